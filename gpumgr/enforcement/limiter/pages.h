/* The three pages that a container shares with the agent and the arbiter. They are files below /etc/gpumgr in the container.
 *
 * Each field is aligned to its size and is read and written as a whole; no field depends on another one that was written in the
 * same instant, so the pages need no lock. A turn is a time in which the container may launch work on a GPU. Times are CLOCK_MONOTONIC in
 * nanoseconds. All numbers are in host byte order. */
#ifndef GPUMGR_PAGES_H
#define GPUMGR_PAGES_H
#include <stdint.h>

#define GM_SUFFIX ".1" /* of the files' names: the version */
enum {
    GM_MAGIC = 0x4d475047, /* "GPGM" */
    GM_VERSION = 1,
    GM_GPUS = 16,    /* per container */
    GM_AWAY_NS = 200000000, /* without an arbiter, each container has its part of each period of this length */
    GM_SLOTS = 1024, /* processes with CUDA per container; further ones share a word of the turn page, and get memory only without a limit */
};

/* limits: the agent writes it, the arbiter writes heartbeat_ns, pass and away_from; read-only in the container. */
struct gm_limits_gpu {
    uint8_t uuid[16];         /* as cuDeviceGetUuid_v2 answers: of the GPU, or of the MIG instance */
    uint64_t memory_bytes;    /* limit; 0: memory is not limited by the library */
    uint64_t uncounted_bytes; /* what the driver uses for this container beyond the library's count (modules, local memory) */
    uint64_t context_bytes;   /* what one context costs on this GPU, as measured by the agent */
    uint32_t share;           /* percent of the GPU's time, 1 to 100; 0: cores are not limited by the library */
    uint32_t ceiling;         /* percent that it may use while others are idle, at least share */
    uint32_t quantum_us;      /* how long one turn lasts */
    uint32_t pass;            /* 1: launches need no turn, since no other container is on the GPU and the ceiling is 100 */
    uint32_t away_from; /* without an arbiter: where the container's part of each GM_AWAY_NS begins, in percent plus 1; 0: not known. All
                         * GPUs of a container have the same value. */
    uint32_t spare;
    uint64_t reserved[7];
};
struct gm_limits {
    uint32_t magic, version;
    uint32_t gpus; /* how many of gpu[] are in use */
    uint32_t suspend; /* 1: the container is suspended, calls wait outside of the driver */
    uint64_t heartbeat_ns; /* of the arbiter */
    uint64_t reserved[5];
    struct gm_limits_gpu gpu[GM_GPUS];
};

/* Suspension. The agent clears resume_requests, sets `suspend`, waits 100 ms for threads that are between the check and the driver, and
 * then locks each process (cuCheckpointProcessLock). After it has unlocked the last one, it clears `suspend`. A thread that calls CUDA
 * while `suspend` is set sets resume_requests and waits, without a turn, until `suspend` is 0, even if no agent runs. The thread looks
 * every 5 ms. The container can write any value into resume_requests, but that can only prevent its own suspension.
 * The library's count does not change: reserved_bytes has what the processes had and will have again. So only the driver knows what a
 * suspended container uses on the GPU. The agent keeps the value of uncounted_bytes from before the suspension. */

/* use: the container's processes write it, the agent reads it and clears the slots of processes that died. */
enum gm_kind { GM_ALLOC, GM_MANAGED, GM_ARRAY, GM_VMM, GM_POOL, GM_GRAPH, GM_CONTEXT, GM_SPARE, GM_KINDS };
struct gm_use_slot_gpu {
    uint64_t bytes[GM_KINDS]; /* that this process has reserved; their sum over all slots is gm_use_gpu.reserved_bytes */
    uint64_t launches;
    uint64_t stack; /* in gpu[0]: where the process's first stack begins, which differs after an exec; 0: not known */
    uint64_t spare;
    uint64_t unknown;   /* in gpu[0]: how often it got a version of a hooked function that the library does not know, and does not limit */
    uint64_t reserved[4]; /* the first one: PENDING in ledger.c */
};
enum gm_state { GM_FREE, GM_ACTIVE, GM_DISABLED };
struct gm_use_slot {
    uint32_t pid;           /* in the process's own PID namespace; 0: the slot is free */
    uint32_t state;         /* enum gm_state */
    uint64_t pid_namespace; /* inode; a process judges only the pids of its own namespace */
    char fault[48];         /* why the library disabled itself, NUL-terminated */
    struct gm_use_slot_gpu gpu[GM_GPUS];
};
struct gm_use_gpu {
    uint64_t reserved_bytes; /* by all processes of the container; changed by compare-and-swap */
    uint64_t refused;        /* how many requests got CUDA_ERROR_OUT_OF_MEMORY from the library */
    uint64_t reserved[6];    /* the first one: CHANGES in ledger.c */
};
struct gm_use {
    uint32_t magic, version;
    uint32_t slots; /* slots below this index may be in use; the others take no memory */
    uint32_t resume_requests; /* not 0: a thread has called CUDA while `suspend` was set; the agent clears it */
    uint64_t reserved[6];
    struct gm_use_gpu gpu[GM_GPUS];
    struct gm_use_slot slot[GM_SLOTS];
};

/* turn: the arbiter writes granted_until_ns, holding_since_ns and grants; the container's processes write the rest.
 *
 * A process that launches sets GM_BUSY in its word first and then looks at granted_until_ns; the arbiter takes the turn away by
 * writing granted_until_ns first and then looks for GM_BUSY. So at least one of them sees what the other has written. */
enum {
    GM_WANTS = 1,        /* a thread waits for the turn */
    GM_BUSY = 2,         /* the process may have work on the GPU that has not ended */
    GM_MEANINGLESS = 0xfc, /* bits that no process of the library sets */
    GM_STAMP_SHIFT = 8,  /* bits 8 to 31: when the word was last confirmed, now_ns >> 24 (16.8 ms), modulo 2^24 */
    GM_STALE_STAMPS = 15 /* a word that was not confirmed for 250 ms belongs to a process that died or was stopped */
};
struct gm_turn_gpu {
    uint64_t granted_until_ns; /* launches may pass before this time; 0: not granted */
    uint64_t holding_since_ns; /* 0: not granted */
    uint32_t grants;           /* futex: changes when a waiting process must look again, for example with each grant */
    uint32_t spare;
    uint32_t slots;            /* words below this index may be in use */
    uint32_t others;           /* the word that all processes without a slot share */
    uint64_t reserved[4];
    uint32_t word[GM_SLOTS]; /* by slot of the use page: GM_WANTS, GM_BUSY, stamp */
};
struct gm_turn {
    uint32_t magic, version;
    uint64_t reserved[7];
    struct gm_turn_gpu gpu[GM_GPUS];
};

static inline uint32_t gm_stamp(uint64_t now_ns) { return (uint32_t)(now_ns >> 24) << GM_STAMP_SHIFT; }

/* The word's flags; 0 if it was not confirmed lately. */
static inline uint32_t gm_word_flags(uint32_t word, uint64_t now_ns) {
    uint32_t age = (gm_stamp(now_ns) - (word & ~0xffu)) >> GM_STAMP_SHIFT;
    return age <= GM_STALE_STAMPS || age > 0xffff00 ? word & (GM_WANTS | GM_BUSY) : 0;
}

_Static_assert(sizeof(struct gm_limits_gpu) == 120 && sizeof(struct gm_limits) == 64 + GM_GPUS * 120, "limits");
_Static_assert(sizeof(struct gm_use_slot) == 64 + GM_GPUS * 128 && sizeof(struct gm_use_gpu) == 64, "use");
_Static_assert(sizeof(struct gm_turn_gpu) == 64 + GM_SLOTS * 4 && sizeof(struct gm_turn) == 64 + GM_GPUS * sizeof(struct gm_turn_gpu), "turn");
#endif
