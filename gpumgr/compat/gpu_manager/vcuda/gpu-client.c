/* gpu-client: registers the calling container's process at the agent, over gRPC on a unix socket, and exits.
 *
 * libcuda-control.so runs it inside the container as /usr/local/nvidia/bin/gpu-client and reads only its exit status:
 *
 *   gpu-client --addr SOCKET --bus-id ID --pod-uid UID (--cont-name NAME | --cont-id ID)
 *
 * 0: registered, without output. 255: failed, with the reason in one line on stderr. The container's image may lack libraries, so the
 * program is static and implements the parts of HTTP/2 (RFC 9113) and HPACK (RFC 7541) that one unary call needs. It sends a header
 * table size of 0, so no header of the response can refer to a dynamic table. While the agent restarts, the call is retried until the
 * deadline; registering twice has no effect.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef DEADLINE_MS
#define DEADLINE_MS 10000
#endif

enum { PAUSE_MS = 50, EXIT_FAILED = 255 };
enum { NAME_MAX_BYTES = 4095, FRAME_HEADER = 9, FRAME_MAX = 16384, BLOCK_MAX = 65536, TEXT_MAX = 1024 };
enum { DATA = 0, HEADERS = 1, RST_STREAM = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, CONTINUATION = 9 };
enum { FLAG_ACK = 1, FLAG_END_STREAM = 1, FLAG_END_HEADERS = 4, FLAG_PADDED = 8, FLAG_PRIORITY = 32 };
enum { GRPC_UNAVAILABLE = 14 };

typedef struct { unsigned char *bytes; size_t size, room; } Buffer;

/* The parts of the response that were read so far; -1: not read. */
typedef struct { int http_status, grpc_status; char message[TEXT_MAX]; } Answer;

/* AGAIN: there was no answer, as while the agent restarts; FAILED: a retry can't succeed. `reason` has the cause in both cases. */
typedef enum { DONE, AGAIN, FAILED } Outcome;

static char reason[TEXT_MAX + 256];
static int64_t deadline;

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

__attribute__((format(printf, 2, 3))) static Outcome because(Outcome outcome, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    return outcome;
}

/* -- the request ------------------------------------------------------------------------------------------------------- */

static void add(Buffer *to, const void *bytes, size_t size) {
    if (to->size + size > to->room) {
        to->room = (to->size + size) * 2;
        if (!(to->bytes = realloc(to->bytes, to->room))) abort();
    }
    if (size) memcpy(to->bytes + to->size, bytes, size);
    to->size += size;
}

static void add_byte(Buffer *to, unsigned value) { add(to, &(unsigned char){(unsigned char)value}, 1); }

static void add_frame(Buffer *to, unsigned type, unsigned flags, unsigned stream, const void *payload, size_t size) {
    unsigned char header[FRAME_HEADER] = {(unsigned char)(size >> 16), (unsigned char)(size >> 8), (unsigned char)size,
        (unsigned char)type, (unsigned char)flags, 0, 0, 0, (unsigned char)stream};
    add(to, header, sizeof header);
    add(to, payload, size);
}

/* An HPACK string without Huffman coding; shorter than 127 bytes. */
static void add_text(Buffer *to, const char *text) {
    add_byte(to, (unsigned)strlen(text));
    add(to, text, strlen(text));
}

/* A protobuf string field; nothing for the empty string. */
static void add_field(Buffer *to, unsigned number, const char *text) {
    size_t size = strlen(text), rest = size;
    if (!size) return;
    add_byte(to, number << 3 | 2);
    for (; rest > 127; rest >>= 7) add_byte(to, (rest & 127) | 128);
    add_byte(to, (unsigned)rest);
    add(to, text, size);
}

/* The whole call, ready to be sent: preface, settings, headers and the one message. */
static Buffer request(const char *pod_uid, const char *bus_id, const char *container, const char *container_id) {
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    static const unsigned char settings[] = {0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0}; /* HEADER_TABLE_SIZE 0, ENABLE_PUSH 0 */
    Buffer out = {0}, headers = {0}, message = {0}, data = {0};
    char timeout[32];

    add(&headers, "\x83\x86\x04", 3); /* :method POST, :scheme http, :path ... */
    add_text(&headers, "/vcuda.VCUDAService/RegisterVDevice");
    add_byte(&headers, 0x01); /* :authority */
    add_text(&headers, "localhost");
    add(&headers, "\x0f\x10", 2); /* content-type */
    add_text(&headers, "application/grpc");
    add_byte(&headers, 0x00);
    add_text(&headers, "te");
    add_text(&headers, "trailers");
    add_byte(&headers, 0x00);
    add_text(&headers, "grpc-timeout");
    snprintf(timeout, sizeof timeout, "%lldm", (long long)(deadline - now_ms() > 1 ? deadline - now_ms() : 1));
    add_text(&headers, timeout);

    add_field(&message, 1, bus_id);
    add_field(&message, 2, pod_uid);
    add_field(&message, 3, container);
    add_field(&message, 4, container_id);
    unsigned char prefix[5] = {0, 0, 0, (unsigned char)(message.size >> 8), (unsigned char)message.size};
    add(&data, prefix, sizeof prefix);
    add(&data, message.bytes, message.size);

    add(&out, preface, sizeof preface - 1);
    add_frame(&out, SETTINGS, 0, 0, settings, sizeof settings);
    add_frame(&out, HEADERS, FLAG_END_HEADERS, 1, headers.bytes, headers.size);
    add_frame(&out, DATA, FLAG_END_STREAM, 1, data.bytes, data.size);
    free(headers.bytes), free(message.bytes), free(data.bytes);
    return out;
}

/* -- HPACK, the parts that a response needs ------------------------------------------------------------------------------ */

/* Lengths in bits of the codes of 0..255 and of the end mark (RFC 7541, appendix B). The lengths determine the codes: within a length the
 * codes ascend with the symbols, and the first code of a length follows the last code of the shorter length. */
static const unsigned char code_length[257] = {
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7,
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21,
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
};

/* The symbol with this code, or -1. */
static int symbol_of(uint32_t code, unsigned length) {
    uint32_t next = 0;
    for (unsigned bits = 1; bits <= length; bits++) {
        next <<= 1;
        for (int symbol = 0; symbol < 257; symbol++) {
            if (code_length[symbol] != bits) continue;
            if (bits == length && next == code) return symbol;
            next++;
        }
    }
    return -1;
}

/* Reads the next part of a header block; each returns 0 at its end or if it is malformed. */
typedef struct { const unsigned char *at, *end; } Reader;

static int read_integer(Reader *in, unsigned prefix_bits, uint32_t *value) {
    uint32_t most = (1u << prefix_bits) - 1;
    if (in->at == in->end) return 0;
    *value = *in->at++ & most;
    if (*value < most) return 1;
    for (unsigned shift = 0; shift <= 21 && in->at < in->end; shift += 7) {
        *value += (uint32_t)(*in->at & 127) << shift;
        if (!(*in->at++ & 128)) return 1;
    }
    return 0;
}

/* The next string into `text`, cut at its size and closed with a zero. */
static int read_string(Reader *in, char *text, size_t room) {
    uint32_t size, code = 0;
    unsigned length = 0;
    size_t written = 0;
    int huffman = in->at < in->end && *in->at & 128;
    if (!read_integer(in, 7, &size) || size > (size_t)(in->end - in->at)) return 0;
    const unsigned char *stop = in->at + size;
    for (; in->at < stop; in->at++) {
        if (!huffman) {
            if (written + 1 < room) text[written++] = (char)*in->at;
            continue;
        }
        for (int bit = 7; bit >= 0; bit--) {
            code = code << 1 | (*in->at >> bit & 1);
            int symbol = ++length < 5 ? -1 : symbol_of(code, length);
            if (symbol == 256 || length > 30) return 0;
            if (symbol < 0) continue;
            if (written + 1 < room) text[written++] = (char)symbol;
            code = length = 0;
        }
    }
    text[written] = 0;
    return !huffman || (length < 8 && code == (1u << length) - 1); /* padding: the first bits of the end mark */
}

static void note_header(Answer *answer, const char *name, const char *value) {
    char *end;
    long number = strtol(value, &end, 10);
    if (end == value || *end) number = 2; /* gRPC's UNKNOWN: the status is not a number */
    if (!strcmp(name, "grpc-status")) answer->grpc_status = (int)number;
    if (!strcmp(name, ":status")) answer->http_status = (int)number;
    if (!strcmp(name, "grpc-message")) snprintf(answer->message, sizeof answer->message, "%s", value);
}

/* Takes the headers of a complete block; 0 if it is malformed. Only :status (8 to 14) of the static table matters here. */
static int read_block(const unsigned char *block, size_t size, Answer *answer) {
    static const char *const status[] = {"200", "204", "206", "304", "400", "404", "500"};
    Reader in = {block, block + size};
    char name[64], value[TEXT_MAX];
    uint32_t index;
    while (in.at < in.end) {
        unsigned kind = *in.at;
        if (kind & 128) { /* a pair of the table */
            if (!read_integer(&in, 7, &index) || index < 1 || index > 61) return 0;
            if (index >= 8 && index <= 14) note_header(answer, ":status", status[index - 8]);
        } else if ((kind & 0xe0) == 0x20) { /* a new size for the dynamic table */
            if (!read_integer(&in, 5, &index) || index != 0) return 0;
        } else {
            if (!read_integer(&in, kind & 64 ? 6 : 4, &index) || index > 61) return 0;
            if (index) snprintf(name, sizeof name, "%s", index >= 8 && index <= 14 ? ":status" : "another");
            else if (!read_string(&in, name, sizeof name)) return 0;
            if (!read_string(&in, value, sizeof value)) return 0;
            note_header(answer, name, value);
        }
    }
    return 1;
}

/* -- the call ------------------------------------------------------------------------------------------------------------ */

/* 1 when the socket is ready, 0 when the deadline has passed. */
static int wait_for(int fd, short events) {
    for (;;) {
        int64_t left = deadline - now_ms();
        struct pollfd one = {fd, events, 0};
        if (left <= 0) return 0;
        if (poll(&one, 1, (int)left) > 0) return 1;
    }
}

static Outcome send_all(int fd, const Buffer *out) {
    for (size_t sent = 0; sent < out->size;) {
        ssize_t size = send(fd, out->bytes + sent, out->size - sent, MSG_NOSIGNAL);
        if (size > 0) { sent += (size_t)size; continue; }
        if (errno == EINTR) continue;
        if (errno != EAGAIN) return because(AGAIN, "the agent hung up: %s", strerror(errno));
        if (!wait_for(fd, POLLOUT)) return because(FAILED, "the agent takes no request");
    }
    return DONE;
}

static Outcome receive_all(int fd, unsigned char *bytes, size_t wanted) {
    for (size_t got = 0; got < wanted;) {
        if (!wait_for(fd, POLLIN)) return because(FAILED, "the agent did not answer within %d ms", DEADLINE_MS);
        ssize_t size = recv(fd, bytes + got, wanted - got, 0);
        if (size == 0) return because(AGAIN, "the agent hung up before it answered");
        if (size > 0) got += (size_t)size;
        else if (errno != EAGAIN && errno != EINTR) return because(AGAIN, "the agent hung up: %s", strerror(errno));
    }
    return DONE;
}

static Outcome reply(int fd, unsigned type, const void *payload, size_t size) {
    Buffer out = {0};
    add_frame(&out, type, FLAG_ACK, 0, payload, size);
    Outcome outcome = send_all(fd, &out);
    free(out.bytes);
    return outcome;
}

/* Adds the headers in this frame to the block; 0 if the frame is malformed. */
static int add_to_block(Buffer *block, unsigned type, unsigned flags, const unsigned char *payload, size_t size) {
    size_t skip = 0, padding = 0;
    if (type == HEADERS) {
        if (flags & FLAG_PADDED) {
            if (!size) return 0;
            padding = payload[0];
            skip = 1;
        }
        if (flags & FLAG_PRIORITY) skip += 5;
    }
    if (skip + padding > size || block->size + size > BLOCK_MAX) return 0;
    add(block, payload + skip, size - skip - padding);
    return 1;
}

static uint32_t number_at(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* Reads frames until the answer on stream 1 is complete. */
static Outcome read_answer(int fd, Answer *answer) {
    unsigned char header[FRAME_HEADER], payload[FRAME_MAX];
    Buffer block = {0};
    Outcome outcome;
    for (int ended = 0;;) {
        if ((outcome = receive_all(fd, header, sizeof header)) != DONE) break;
        size_t size = (size_t)header[0] << 16 | (size_t)header[1] << 8 | header[2];
        unsigned type = header[3], flags = header[4], stream = number_at(header + 5) & 0x7fffffff;
        if (size > sizeof payload) { outcome = because(FAILED, "what answers is no gRPC server"); break; }
        if ((outcome = receive_all(fd, payload, size)) != DONE) break;
        if (type == SETTINGS && !(flags & FLAG_ACK)) outcome = reply(fd, SETTINGS, NULL, 0);
        if (type == PING && !(flags & FLAG_ACK)) outcome = reply(fd, PING, payload, size);
        if (type == GOAWAY && size >= 8 && (number_at(payload) & 0x7fffffff) < 1)
            outcome = because(AGAIN, "the agent is ending");
        if (type == RST_STREAM && stream == 1 && answer->grpc_status < 0)
            outcome = because(FAILED, "the agent broke the call off (HTTP/2 error %u)", size == 4 ? number_at(payload) : 0);
        if (outcome != DONE) break;
        if (stream != 1) continue;
        if (type == HEADERS || type == CONTINUATION) {
            if (type == HEADERS) ended = flags & FLAG_END_STREAM;
            int whole = add_to_block(&block, type, flags, payload, size);
            if (whole && flags & FLAG_END_HEADERS) {
                whole = read_block(block.bytes, block.size, answer);
                block.size = 0;
                if (whole && ended) break;
            }
            if (!whole) { outcome = because(FAILED, "the agent's answer has headers that can't be read"); break; }
        }
        if (type == RST_STREAM || (type == DATA && flags & FLAG_END_STREAM)) break;
    }
    free(block.bytes);
    return outcome;
}

/* Decodes the percent encoding of grpc-message, and replaces line breaks. */
static void decode_message(char *text) {
    char *to = text;
    for (char *at = text; *at; at++) {
        unsigned byte = (unsigned char)*at;
        if (byte == '%' && isxdigit((unsigned char)at[1]) && isxdigit((unsigned char)at[2])) {
            byte = (unsigned)strtoul((char[]){at[1], at[2], 0}, NULL, 16);
            at += 2;
        }
        *to++ = byte < 32 || byte == 127 ? ' ' : (char)byte;
    }
    *to = 0;
}

static Outcome judge(Answer *answer) {
    if (answer->grpc_status == 0) return DONE;
    if (answer->grpc_status < 0) return because(FAILED, "the answer has HTTP status %d and no gRPC status", answer->http_status);
    decode_message(answer->message);
    return because(answer->grpc_status == GRPC_UNAVAILABLE ? AGAIN : FAILED, "the agent refused (gRPC status %d): %s",
        answer->grpc_status, *answer->message ? answer->message : "no reason given");
}

static Outcome call_once(const struct sockaddr_un *address, const Buffer *out) {
    Answer answer = {-1, -1, ""};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return because(FAILED, "no socket: %s", strerror(errno));
    Outcome outcome = DONE;
    if (connect(fd, (const struct sockaddr *)address, sizeof *address)) {
        /* The socket is missing, no process listens, or the queue is full: the agent restarts, or is under load. */
        int again = errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR;
        outcome = because(again ? AGAIN : FAILED, "can't connect: %s", strerror(errno));
    }
    if (outcome == DONE) outcome = send_all(fd, out);
    if (outcome == DONE) outcome = read_answer(fd, &answer);
    if (outcome == DONE) outcome = judge(&answer);
    close(fd);
    return outcome;
}

/* -- the command --------------------------------------------------------------------------------------------------------- */

enum { ADDR, BUS_ID, POD_UID, CONT_NAME, CONT_ID, FLAGS };
static const char *const flag_name[FLAGS] = {"addr", "bus-id", "pod-uid", "cont-name", "cont-id"};

static int fail(const char *what) {
    fprintf(stderr, "gpu-client: %s\n", what);
    return EXIT_FAILED;
}

/* Fills in the values of --flag VALUE and --flag=VALUE; returns the exit status, 0 without an error. */
static int parse(int argc, char **argv, const char **value) {
    for (int at = 1; at < argc; at++) {
        int flag = 0;
        size_t size = strcspn(argv[at], "=");
        while (flag < FLAGS && !(!strncmp(argv[at], "--", 2) && strlen(flag_name[flag]) == size - 2 &&
                                 !strncmp(argv[at] + 2, flag_name[flag], size - 2))) flag++;
        if (flag == FLAGS) return snprintf(reason, sizeof reason, "unknown argument %.200s", argv[at]), fail(reason);
        if (argv[at][size]) value[flag] = argv[at] + size + 1;
        else if (++at < argc) value[flag] = argv[at];
        else return snprintf(reason, sizeof reason, "--%s needs a value", flag_name[flag]), fail(reason);
        if (strlen(value[flag]) > NAME_MAX_BYTES)
            return snprintf(reason, sizeof reason, "--%s is longer than %d bytes", flag_name[flag], NAME_MAX_BYTES), fail(reason);
    }
    if (!*value[ADDR] || !*value[POD_UID] || (!*value[CONT_NAME] && !*value[CONT_ID]))
        return fail("--addr, --pod-uid and one of --cont-name and --cont-id are needed");
    if (*value[CONT_ID]) value[CONT_NAME] = "";
    if (strlen(value[BUS_ID]) + strlen(value[POD_UID]) + strlen(value[CONT_NAME]) + strlen(value[CONT_ID]) > FRAME_MAX - 64)
        return fail("the names are longer than one request can be");
    return 0;
}

int main(int argc, char **argv) {
    const char *value[FLAGS] = {"", "", "", "", ""};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int status = parse(argc, argv, value);
    if (status) return status;
    if (strlen(value[ADDR]) >= sizeof address.sun_path) return fail("--addr is longer than the path of a unix socket can be");
    memcpy(address.sun_path, value[ADDR], strlen(value[ADDR]));

    deadline = now_ms() + DEADLINE_MS;
    Buffer out = request(value[POD_UID], value[BUS_ID], value[CONT_NAME], value[CONT_ID]);
    Outcome outcome;
    while ((outcome = call_once(&address, &out)) == AGAIN && now_ms() + PAUSE_MS < deadline) poll(NULL, 0, PAUSE_MS);
    if (outcome == DONE) return 0;
    fprintf(stderr, "gpu-client: not registered at %s: %s\n", value[ADDR], reason);
    return EXIT_FAILED;
}
