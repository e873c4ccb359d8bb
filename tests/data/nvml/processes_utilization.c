/* Appended to gpumgr/sim/nvml.c: the call by which drivers 550 and newer report the utilization of processes. */
typedef struct { unsigned long long timestamp; unsigned pid, sm, memory, encoder, decoder, jpeg, ofa; } newer_sample_t;
typedef struct { unsigned version, count; unsigned long long since; newer_sample_t *list; } newer_samples_t;

EXPORT result_t nvmlDeviceGetProcessesUtilizationInfo(void *d, newer_samples_t *answer) {
    ENTER_GPU(d);
    process_sample_t samples[MAX_PROCESSES];
    if (answer->version != (sizeof *answer | 1u << 24)) return leave(ARGUMENT_VERSION_MISMATCH);
    result_t result = put_samples(i, answer->list ? samples : NULL, &answer->count, answer->since);
    for (unsigned n = 0; !result && n < answer->count; n++)
        answer->list[n] = (newer_sample_t){.timestamp = samples[n].timestamp, .pid = samples[n].pid, .sm = samples[n].sm};
    return leave(result);
}
