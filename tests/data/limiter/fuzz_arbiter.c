/* Fuzzer of the arbiter: fuzz_arbiter SEED ROUNDS SECONDS. In each round two tenants share a GPU for ten seconds of a clock of its own. One
 * of them damages its turn page; the other one always has work and must get its share within 5 points. The limits page of a tenant of
 * another GPU is damaged. Afterwards the turn page must be repaired. Prints the round that failed, with the seed that repeats it. */
#define _GNU_SOURCE
#include <time.h>
static long long fuzz_now = 1000000000;
static int fuzz_clock(clockid_t id, struct timespec *t) {
    (void)id;
    t->tv_sec = fuzz_now / 1000000000, t->tv_nsec = fuzz_now % 1000000000;
    return 0;
}
#define clock_gettime fuzz_clock
#include "arbiter.c"
#undef clock_gettime
#include "fuzz.h"
#include <stdio.h>
#include <stdlib.h>

enum { HOSTILE, ODD_LIMITS, HONEST, PLAYERS };
static const uint32_t shares[PLAYERS] = {25, 50, 75};
static int files[PLAYERS][2], numbers[PLAYERS]; /* limits, turn */

static int page(const char *name, const void *content, size_t head, size_t size) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size) || pwrite(fd, content, head, 0) != (ssize_t)head) exit(2);
    return fd;
}
static void join(int i) {
    struct gm_limits limits = {.magic = GM_MAGIC, .version = GM_VERSION, .gpus = 1};
    limits.gpu[0].share = limits.gpu[0].ceiling = shares[i], limits.gpu[0].quantum_us = 20000;
    struct gm_turn turn = {.magic = GM_MAGIC, .version = GM_VERSION};
    files[i][0] = page("limits", &limits, sizeof limits, sizeof limits);
    files[i][1] = page("turn", &turn, sizeof turn, sizeof turn);
    numbers[i] = gm_arbiter_add(i == ODD_LIMITS, 0, files[i][0], files[i][1]);
}
static void leave(int i) {
    gm_arbiter_remove(numbers[i]);
    close(files[i][0]), close(files[i][1]);
}
/* A process that always has work: it has launched while it holds the turn, and drains at once, or never. True: it holds the turn. */
static bool work(int i, bool drains) {
    struct gm_turn_gpu turn;
    off_t at = (off_t)offsetof(struct gm_turn, gpu);
    if (pread(files[i][1], &turn, sizeof turn, at) != (ssize_t)sizeof turn) return false;
    bool holds = (uint64_t)fuzz_now < turn.granted_until_ns;
    turn.slots = 1, turn.word[0] = gm_stamp((uint64_t)fuzz_now) | GM_WANTS | (holds || !drains ? GM_BUSY : 0);
    put(files[i][1], &turn.slots, sizeof turn.slots, at + (off_t)offsetof(struct gm_turn_gpu, slots));
    put(files[i][1], turn.word, sizeof *turn.word, at + (off_t)offsetof(struct gm_turn_gpu, word));
    return holds;
}
static void damage(int fd, size_t most, size_t size) {
    static uint8_t content[2 * sizeof(struct gm_turn)];
    if (!fuzz(16) && ftruncate(fd, (off_t)fuzz(2 * size))) exit(2);
    ssize_t n = pread(fd, content, fuzz(4) ? most : size, 0);
    if (n <= 8) return;
    fuzz_damage(content, (size_t)n, (uint64_t)fuzz_now);
    if (pwrite(fd, content, (size_t)n, 0) != n) exit(2);
}
/* The percentage of the time in which the honest tenant holds the turn. */
static double ten_seconds(uint64_t how_often, bool drains) {
    long long begun = fuzz_now, held = 0, refreshed = 0;
    while (fuzz_now < begun + 10000 * MS) {
        long long step = fuzz(64) ? SCAN_NS : (long long)fuzz(5 * MS);
        fuzz_now += step;
        if (!fuzz(how_often)) damage(files[HOSTILE][1], 64 + 4096, sizeof(struct gm_turn));
        else if (fuzz(8)) work(HOSTILE, drains);
        if (!fuzz(how_often)) damage(files[ODD_LIMITS][0], 64 + 120, sizeof(struct gm_limits));
        if (fuzz(2)) work(ODD_LIMITS, true);
        if (!fuzz(2000)) leave(HOSTILE), join(HOSTILE);
        bool refreshes = fuzz_now - refreshed >= REFRESH_NS;
        if (refreshes) refreshed = fuzz_now;
        if (work(HONEST, true)) held += step;
        int64_t pause = scan(fuzz_now, refreshes);
        if (pause < DRAIN_SCAN_NS || pause > REST_SCAN_NS) return -1;
        work(HONEST, true);
    }
    return 100.0 * (double)held / (double)(fuzz_now - begun);
}
static bool repaired(void) {
    for (int i = 0; i < 8; i++) damage(files[HOSTILE][1], 64 + 64, sizeof(struct gm_turn));
    for (int i = 0; i < 2; i++) scan(fuzz_now += REFRESH_NS, true);
    struct gm_turn turn;
    struct stat file;
    const struct tenant *t = &tenants[numbers[HOSTILE]];
    if (fstat(files[HOSTILE][1], &file) || file.st_size != (off_t)sizeof turn) return false;
    if (pread(files[HOSTILE][1], &turn, sizeof turn, 0) != (ssize_t)sizeof turn) return false;
    return turn.magic == GM_MAGIC && turn.version == GM_VERSION && turn.gpu[0].granted_until_ns == t->until &&
           turn.gpu[0].holding_since_ns == t->since && turn.gpu[0].grants == t->grants && turn.gpu[0].slots <= GM_SLOTS;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    uint64_t seed = strtoull(argv[1], NULL, 10), rounds = strtoull(argv[2], NULL, 10);
    for (time_t end = time(NULL) + atoi(argv[3]); rounds || time(NULL) < end; seed++, rounds -= rounds > 0) {
        fuzz_state = seed;
        for (int i = 0; i < PLAYERS; i++) join(i);
        uint64_t how_often = fuzz(4) ? 1 + fuzz(40) : 1000;
        double held = ten_seconds(how_often, fuzz(2));
        bool whole = repaired();
        for (int i = 0; i < PLAYERS; i++) leave(i);
        if (held >= shares[HONEST] - 5 && whole) continue;
        printf("seed %llu: the honest tenant held the turn %.1f %% of the time; the page is %srepaired\n", (unsigned long long)seed, held, whole ? "" : "not ");
        return 1;
    }
    return 0;
}
