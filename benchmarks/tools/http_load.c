/* A closed-loop HTTP load generator: every connection sends its next request when the last one is answered.
 *
 *     http_load PORT PATH CONNECTIONS SECONDS BODY_FILE [HEADER ...]
 *
 * Sends POST requests with the bytes of BODY_FILE to 127.0.0.1 and prints one JSON object: completed requests (`n`,
 * `rps`), connection errors and truncated answers (`errors`), answers with another status than 200 (`non200`),
 * percentiles of request latency and of the time to the first body byte (`p50_ms`, `ttft_p50_ms`, ...), and server-sent
 * events per second. Requests under way when the time is up are not counted; their events are.
 *
 * One thread, one epoll instance, no busy waiting: the core is left to the server where both share it.
 */
#include "common.h"

#include <sys/resource.h>

enum { HEAD_BYTES = 16384, READ_BYTES = 65536, EPOLL_EVENTS = 256, MAX_CONNECTIONS = 65536, RETRY_US = 1000 };

enum phase { HEAD, SIZED_BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILERS };

struct connection {
    int fd;
    size_t sent;                  /* bytes of the request */
    int is_blocked;               /* EPOLLOUT is watched */
    uint64_t started_ns;
    double ttft_ms;               /* below 0 before the first body byte */
    enum phase phase;
    int status, closes;
    size_t left;                  /* bytes of the body or of the chunk */
    size_t line_length;           /* of a chunk size or trailer line */
    int matched;                  /* characters of "data:" matched at the start of a line; -1: another line */
    size_t head_length;
    char head[HEAD_BYTES];
};

struct series {
    double *values;
    size_t count, capacity;
};

static int epoll_fd, port;
static char *request;
static size_t request_length;
static struct series latencies, first_bytes;
static uint64_t errors, other_statuses, stream_events;

/* -- figures ------------------------------------------------------------------------------------------------------ */

static void record(struct series *series, double value)
{
    if (series->count == series->capacity) {
        series->capacity = series->capacity ? 2 * series->capacity : 65536;
        series->values = checked(realloc(series->values, series->capacity * sizeof *series->values));
    }
    series->values[series->count++] = value;
}

static int ascending(const void *a, const void *b)
{
    double one = *(const double *)a, other = *(const double *)b;
    return (one > other) - (one < other);
}

/* Nearest rank; the values are sorted. */
static double percentile(const struct series *series, double part)
{
    return series->count ? series->values[(size_t)(part * (double)(series->count - 1) + 0.5)] : 0.0;
}

static void print_figures(double seconds)
{
    qsort(latencies.values, latencies.count, sizeof(double), ascending);
    qsort(first_bytes.values, first_bytes.count, sizeof(double), ascending);
    printf("{\"n\":%zu,\"rps\":%.1f,\"errors\":%llu,\"non200\":%llu,\"p50_ms\":%.3f,\"p90_ms\":%.3f,\"p99_ms\":%.3f,"
           "\"ttft_p50_ms\":%.3f,\"ttft_p99_ms\":%.3f,\"events\":%llu,\"events_per_s\":%.0f,\"seconds\":%.3f}\n",
           latencies.count, (double)latencies.count / seconds, (unsigned long long)errors,
           (unsigned long long)other_statuses, percentile(&latencies, 0.5), percentile(&latencies, 0.9),
           percentile(&latencies, 0.99), percentile(&first_bytes, 0.5), percentile(&first_bytes, 0.99),
           (unsigned long long)stream_events, (double)stream_events / seconds, seconds);
}

/* -- requests ----------------------------------------------------------------------------------------------------- */

static void make_request(const char *path, const char *body_file, char **headers, int header_count)
{
    FILE *file = fopen(body_file, "rb"), *out = open_memstream(&request, &request_length);
    char bytes[65536];
    size_t count;
    long length;

    if (!file || fseek(file, 0, SEEK_END) < 0 || (length = ftell(file)) < 0)
        die(body_file);
    rewind(file);
    fprintf(out, "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n", path, port);
    for (int number = 0; number < header_count; number++)
        fprintf(out, "%s\r\n", headers[number]);
    fprintf(out, "Content-Length: %ld\r\n\r\n", length);
    while ((count = fread(bytes, 1, sizeof bytes, file)) > 0)
        fwrite(bytes, 1, count, out);
    fclose(file);
    fclose(out);
}

static void watch(struct connection *connection, int operation, uint32_t what)
{
    struct epoll_event event = {.events = what, .data.ptr = connection};
    if (epoll_ctl(epoll_fd, operation, connection->fd, &event) < 0)
        die("epoll_ctl");
}

/* Sends what is left of the request, now or at EPOLLOUT. False: the connection is lost. */
static int send_request(struct connection *connection)
{
    while (connection->sent < request_length) {
        ssize_t count = send(connection->fd, request + connection->sent, request_length - connection->sent,
                             MSG_DONTWAIT);
        if (count < 0 && errno != EAGAIN)
            return 0;
        if (count < 0) {
            if (!connection->is_blocked)
                watch(connection, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            connection->is_blocked = 1;
            return 1;
        }
        connection->sent += (size_t)count;
    }
    if (connection->is_blocked)
        watch(connection, EPOLL_CTL_MOD, EPOLLIN);
    connection->is_blocked = 0;
    return 1;
}

static int start_request(struct connection *connection)
{
    connection->started_ns = now_ns();
    connection->ttft_ms = -1.0;
    connection->phase = HEAD;
    connection->sent = connection->head_length = 0;
    return send_request(connection);
}

static void reconnect(struct connection *connection)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int on = 1;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (;;) {
        if (connection->fd >= 0)
            close(connection->fd);
        connection->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connection->fd < 0)
            die("socket");
        if (connect(connection->fd, (struct sockaddr *)&address, sizeof address) == 0)
            break;
        if (!latencies.count && !other_statuses)
            die("connect");
        errors++;
        usleep(RETRY_US);
    }
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connection->is_blocked = 0;
    watch(connection, EPOLL_CTL_ADD, EPOLLIN);
}

/* -- answers ------------------------------------------------------------------------------------------------------ */

/* Counts the lines of a body that begin with "data:", also where a read ends within one. */
static void count_events(struct connection *connection, const char *bytes, size_t length)
{
    static const char field[] = "data:";
    const char *end = bytes + length;
    while (bytes < end) {
        if (connection->matched < 0) {
            bytes = memchr(bytes, '\n', (size_t)(end - bytes));
            if (!bytes)
                return;
            bytes++;
            connection->matched = 0;
        } else if (*bytes == field[connection->matched]) {
            bytes++;
            if (++connection->matched == (int)sizeof field - 1) {
                stream_events++;
                connection->matched = -1;
            }
        } else {
            connection->matched = -1;
        }
    }
}

static void take_body(struct connection *connection, const char *bytes, size_t length)
{
    if (length && connection->ttft_ms < 0)
        connection->ttft_ms = (double)(now_ns() - connection->started_ns) / 1e6;
    count_events(connection, bytes, length);
    connection->left -= length;
}

/* The head is complete: status and framing. False: it is not HTTP/1.1, or has no known length. */
static int parse_head(struct connection *connection)
{
    char *head = connection->head, *field;
    if (sscanf(head, "HTTP/1.1 %d", &connection->status) != 1)
        return 0;
    connection->closes = strcasestr(head, "\r\nconnection: close") != NULL;
    connection->matched = 0;
    connection->line_length = connection->left = 0;
    if (strcasestr(head, "\r\ntransfer-encoding: chunked")) {
        connection->phase = CHUNK_SIZE;
        return 1;
    }
    field = strcasestr(head, "\r\ncontent-length:");
    if (!field)
        return 0;
    connection->left = strtoul(field + strlen("\r\ncontent-length:"), NULL, 10);
    connection->phase = SIZED_BODY;
    return 1;
}

/* Takes bytes up to the end of the head; how many, or -1 for an invalid head. */
static ssize_t take_head(struct connection *connection, const char *bytes, size_t length)
{
    size_t old = connection->head_length, room = HEAD_BYTES - 1 - old;
    size_t count = length < room ? length : room;
    size_t from = old > 3 ? old - 3 : 0;
    char *blank;

    memcpy(connection->head + old, bytes, count);
    connection->head_length += count;
    connection->head[connection->head_length] = 0;
    blank = memmem(connection->head + from, connection->head_length - from, "\r\n\r\n", 4);
    if (!blank)
        return count == room ? -1 : (ssize_t)count;
    blank[2] = 0;
    return parse_head(connection) ? (ssize_t)((size_t)(blank + 4 - connection->head) - old) : -1;
}

/* Takes one byte of chunk framing. True: the answer is complete. */
static int take_framing(struct connection *connection, char byte)
{
    if (connection->phase == CHUNK_SIZE && byte != '\n') {
        static const char digits[] = "0123456789abcdef";
        const char *digit = byte ? strchr(digits, byte | (byte > '9' ? 32 : 0)) : NULL;
        if (digit)
            connection->left = connection->left * 16 + (size_t)(digit - digits);
    } else if (connection->phase == CHUNK_SIZE) {
        connection->phase = connection->left ? CHUNK_DATA : TRAILERS;
        connection->line_length = 0;
    } else if (connection->phase == CHUNK_END && byte == '\n') {
        connection->phase = CHUNK_SIZE;
    } else if (connection->phase == TRAILERS && byte == '\n') {
        if (!connection->line_length)
            return 1;
        connection->line_length = 0;
    } else if (connection->phase == TRAILERS && byte != '\r') {
        connection->line_length++;
    }
    return 0;
}

enum result { MORE, COMPLETE, BROKEN };

static enum result take_answer(struct connection *connection, const char *bytes, size_t length)
{
    while (length) {
        size_t used = 1;
        if (connection->phase == HEAD) {
            ssize_t count = take_head(connection, bytes, length);
            if (count < 0)
                return BROKEN;
            used = (size_t)count;
        } else if (connection->phase == SIZED_BODY || connection->phase == CHUNK_DATA) {
            used = length < connection->left ? length : connection->left;
            take_body(connection, bytes, used);
            if (!connection->left && connection->phase == CHUNK_DATA)
                connection->phase = CHUNK_END;
        } else if (take_framing(connection, *bytes)) {
            return COMPLETE;
        }
        if (connection->phase == SIZED_BODY && !connection->left)
            return COMPLETE;
        bytes += used;
        length -= used;
    }
    return MORE;
}

static void finish_request(struct connection *connection)
{
    double latency_ms = (double)(now_ns() - connection->started_ns) / 1e6;
    record(&latencies, latency_ms);
    record(&first_bytes, connection->ttft_ms < 0 ? latency_ms : connection->ttft_ms);
    if (connection->status != 200)
        other_statuses++;
}

static void handle(struct connection *connection, uint32_t what)
{
    static char bytes[READ_BYTES];
    enum result result = MORE;
    if (what & EPOLLOUT && !send_request(connection))
        result = BROKEN;
    if (result == MORE && what & ~(uint32_t)EPOLLOUT) {
        ssize_t count = recv(connection->fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (count > 0)
            result = take_answer(connection, bytes, (size_t)count);
        else if (count == 0 || errno != EAGAIN)
            result = BROKEN;
    }
    if (result == MORE)
        return;
    if (result == COMPLETE)
        finish_request(connection);
    else
        errors++;
    if (result == BROKEN || connection->closes)
        reconnect(connection);
    while (!start_request(connection)) {
        errors++;
        reconnect(connection);
    }
}

/* -- the run ------------------------------------------------------------------------------------------------------ */

static void allow_many_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

int main(int count, char **arguments)
{
    struct epoll_event ready[EPOLL_EVENTS];
    struct connection *connections;
    int number_of = count > 5 ? atoi(arguments[3]) : 0;
    double seconds = count > 5 ? atof(arguments[4]) : 0.0;
    uint64_t begin, end, now;

    if (number_of < 1 || number_of > MAX_CONNECTIONS || seconds <= 0) {
        fprintf(stderr, "usage: http_load PORT PATH CONNECTIONS SECONDS BODY_FILE [HEADER ...]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    allow_many_files();
    port = atoi(arguments[1]);
    make_request(arguments[2], arguments[5], arguments + 6, count - 6);
    epoll_fd = epoll_create1(0);
    connections = checked(calloc((size_t)number_of, sizeof *connections));
    for (int number = 0; number < number_of; number++) {
        connections[number].fd = -1;
        reconnect(&connections[number]);
    }
    begin = now_ns();
    end = begin + (uint64_t)(seconds * 1e9);
    for (int number = 0; number < number_of; number++)
        while (!start_request(&connections[number])) {
            errors++;
            reconnect(&connections[number]);
        }
    while ((now = now_ns()) < end) {
        int found = epoll_wait(epoll_fd, ready, EPOLL_EVENTS, (int)((end - now) / 1000000u) + 1);
        for (int index = 0; index < found; index++)
            handle(ready[index].data.ptr, ready[index].events);
    }
    print_figures((double)(now - begin) / 1e9);
    return 0;
}
