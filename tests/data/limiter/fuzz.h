/* Numbers and damage for the fuzzers of the pages: the same for the same seed. */
#pragma once
#include "pages.h"
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint64_t fuzz_state;
static inline uint64_t fuzz(uint64_t below) { /* splitmix64 */
    uint64_t z = fuzz_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % below;
}
/* A number that code may stumble over, or a time near now. */
static inline uint64_t fuzz_number(uint64_t now_ns) {
    static const uint64_t odd[] = {0, 1, 2, 3, 63, 64, 65, GM_GPUS, GM_SLOTS - 1, GM_SLOTS, GM_SLOTS + 1, 0x7fffffff, 0x80000000, 0xffffffff,
                                   INT64_MAX, 1ull << 63, UINT64_MAX - 1, UINT64_MAX};
    uint64_t kind = fuzz(4);
    if (kind == 0) return now_ns + fuzz(400000000) - 200000000;
    if (kind == 1) return fuzz(UINT64_MAX);
    return odd[fuzz(sizeof odd / sizeof *odd)];
}
/* Damages `n` bytes at `page`: a field, a byte, a range, or all of it. */
static inline void fuzz_damage(void *page, size_t n, uint64_t now_ns) {
    uint8_t *at = page;
    uint64_t value = fuzz_number(now_ns);
    size_t width = fuzz(2) ? 8 : 4, place = fuzz(3) ? fuzz(n < 256 ? n : 256) : fuzz(n);
    if (place / width * width + width > n) return;
    switch (fuzz(8)) {
    case 0: at[place] = (uint8_t)value; break;
    case 1: memset(at + place, (int)value, fuzz(n - place)); break;
    case 2:
        for (size_t i = fuzz(64); i < n; i += 1 + fuzz(512)) at[i] = (uint8_t)fuzz(256);
        break;
    default: memcpy(at + place / width * width, &value, width);
    }
}
