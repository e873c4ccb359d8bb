"""What the kubelet hears and when; what it must have heard by now."""

import asyncio

import pytest

from gpumgr.agent.offers import SETTLE_SECONDS, Offers
from gpumgr.allocator.ids import ALL_CORES, Card
from gpumgr.allocator.offer import CardOffer, Offer
from tests.component.stage.stage import Clock

CARD = Card("0000abcd", "GPU-0000abcd", 4)
ALL = 0b1111


def offer(cores: int = ALL_CORES, blocks: int = ALL, card: Card = CARD) -> Offer:
    return (CardOffer(card, cores, blocks),)


class Kubelet:
    """Hears offers; the clock is turned by hand."""

    def __init__(self, *, watching: bool = True) -> None:
        self.heard: list[Offer] = []
        self.told = asyncio.Event()
        self.clock = Clock()
        self.offers = Offers(self._hear, clock=self.clock)
        if watching:
            self.offers.start()

    def _hear(self, new: Offer) -> None:
        self.heard.append(new)
        self.told.set()

    @property
    def seen(self) -> int:
        return self.offers.visible_blocks()[CARD.name]


async def test_the_first_offer_is_told_at_once_and_counts_as_seen() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    assert kubelet.heard == [offer()]
    assert kubelet.seen == ALL


async def test_nothing_is_told_before_somebody_can_hear_it() -> None:
    kubelet = Kubelet(watching=False)
    kubelet.offers.update(offer(blocks=0b0001))
    kubelet.offers.update(offer())
    assert kubelet.heard == []
    kubelet.offers.start()
    assert kubelet.heard == [offer()]


async def test_what_does_not_change_is_not_told_again() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    kubelet.offers.update(offer())
    assert len(kubelet.heard) == 1


async def test_flips_of_blocks_are_gathered() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    kubelet.clock.now += SETTLE_SECONDS - 0.01
    for blocks in (0b0001, 0b0011, 0b0111):
        kubelet.offers.update(offer(blocks=blocks))
    assert len(kubelet.heard) == 1
    kubelet.told.clear()
    await kubelet.told.wait()
    assert kubelet.heard[1:] == [offer(blocks=0b0111)]


async def test_a_flip_that_is_taken_back_is_never_told() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    kubelet.offers.update(offer(blocks=0))
    kubelet.offers.update(offer())
    kubelet.clock.now += 5
    kubelet.offers.update(offer(blocks=0b0001))
    assert kubelet.heard == [offer(), offer(blocks=0b0001)]


@pytest.mark.parametrize(
    "urgent",
    [
        offer(cores=0, blocks=0),
        offer(blocks=ALL, card=Card(CARD.name, CARD.uuid, 8)),
        (*offer(), CardOffer(Card("0000beef", "GPU-0000beef", 4), ALL_CORES, ALL)),
    ],
    ids=["fails", "grows", "comes"],
)
async def test_a_gpu_that_fails_grows_or_comes_is_told_at_once(urgent: Offer) -> None:
    """What was held back goes with it."""
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    kubelet.offers.update(offer(blocks=0b0111))
    kubelet.offers.update(urgent)
    assert kubelet.heard == [offer(), urgent]
    kubelet.offers.close()


async def test_a_block_counts_as_seen_healthy_a_second_after_it_was_told() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer(blocks=0b0001))
    kubelet.clock.now += 2
    kubelet.offers.update(offer(blocks=ALL))
    assert kubelet.seen == 0b0001
    kubelet.clock.now += SETTLE_SECONDS
    assert kubelet.seen == ALL


async def test_a_block_that_turned_unhealthy_is_out_at_once() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    kubelet.clock.now += 2
    kubelet.offers.update(offer(blocks=0b0001))
    assert kubelet.seen == 0b0001


async def test_blocks_that_flicker_are_not_seen_until_they_settle() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    for blocks in (0b0001, ALL, 0b0011, ALL):
        kubelet.clock.now += SETTLE_SECONDS / 2
        kubelet.offers.update(offer(cores=ALL_CORES - len(kubelet.heard), blocks=blocks))
    assert kubelet.seen == 0b0001
    kubelet.clock.now += SETTLE_SECONDS
    assert kubelet.seen == ALL


async def test_in_haste_what_is_held_back_is_told_and_counts() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer(blocks=0b0001))
    kubelet.offers.update(offer())
    assert kubelet.heard == [offer(blocks=0b0001)]
    assert kubelet.offers.hurry()
    assert kubelet.heard[-1] == offer()
    assert kubelet.seen == 0b0001
    assert kubelet.offers.visible_blocks(0)[CARD.name] == ALL


async def test_there_is_no_haste_when_everything_was_seen() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    assert not kubelet.offers.hurry()
    assert kubelet.heard == [offer()]


async def test_after_the_close_nothing_is_told() -> None:
    kubelet = Kubelet()
    kubelet.offers.update(offer())
    kubelet.clock.now += SETTLE_SECONDS - 0.001
    kubelet.offers.update(offer(blocks=0))
    kubelet.offers.close()
    await asyncio.sleep(0.01)
    assert len(kubelet.heard) == 1
