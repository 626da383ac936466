/* An OpenAI-compatible server that computes nothing: the backend behind a gateway under test.
 *
 *     mock_llm PORT [TOKENS [ITL_US]]
 *
 * POST /v1/chat/completions and /v1/completions answer with TOKENS tokens (16): as one JSON body, or as server-sent
 * events if the request has "stream": true. Each event is one write, as real servers send them. Token i of a stream is
 * due i * ITL_US microseconds (0) after its request. GET /v1/models lists the model `m`, /metrics reports an idle vLLM,
 * any other GET is answered with {}.
 *
 * One thread, one epoll instance. A connection owns its buffers; a paced stream is also in the list `pacing`, ordered
 * by the time its next event is due, for which one timer is armed.
 */
#include "common.h"

#include <sys/timerfd.h>

enum { MAX_HEAD_BYTES = 65536, READ_BYTES = 65536, MAX_TOKENS = 100000, EPOLL_EVENTS = 256 };

struct buffer {
    char *bytes;
    size_t length, capacity;
};

struct connection {
    int fd;
    struct buffer input, output;
    size_t sent;                     /* bytes of `output` that the socket has taken */
    int is_blocked;                  /* EPOLLOUT is watched */
    int is_streaming, next_event;    /* index into `events` */
    uint64_t due_ns;                 /* of the next event */
    struct connection *before, *after;
};

static int epoll_fd, timer_fd, listen_fd;
static int tokens = 16;
static uint64_t itl_ns = 0;
static struct buffer *events;        /* `tokens` events, each a complete HTTP chunk, and the end of the stream */
static struct buffer stream_head, whole_answer, models_answer, metrics_answer, empty_answer, not_found_answer;
static struct connection pacing = {.before = &pacing, .after = &pacing};

static void reserve(struct buffer *buffer, size_t capacity)
{
    if (capacity <= buffer->capacity)
        return;
    size_t grown = buffer->capacity * 2 > capacity ? buffer->capacity * 2 : capacity;
    buffer->bytes = checked(realloc(buffer->bytes, grown));
    buffer->capacity = grown;
}

static void append(struct buffer *buffer, const char *bytes, size_t length)
{
    reserve(buffer, buffer->length + length);
    memcpy(buffer->bytes + buffer->length, bytes, length);
    buffer->length += length;
}

static void append_text(struct buffer *buffer, const char *text)
{
    append(buffer, text, strlen(text));
}

/* -- answers, made once ------------------------------------------------------------------------------------------- */

static struct buffer answer(const char *status, const char *type, const char *body)
{
    struct buffer made = {0};
    char head[256];
    snprintf(head, sizeof head, "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", status, type,
             strlen(body));
    append_text(&made, head);
    append_text(&made, body);
    return made;
}

static void append_chunk(struct buffer *buffer, const char *data)
{
    char size[32];
    snprintf(size, sizeof size, "%zx\r\n", strlen("data: ") + strlen(data) + strlen("\n\n"));
    append_text(buffer, size);
    append_text(buffer, "data: ");
    append_text(buffer, data);
    append_text(buffer, "\n\n\r\n");
}

static void make_answers(void)
{
    char json[512];
    struct buffer content = {0}, body = {0};

    events = checked(calloc((size_t)tokens + 1, sizeof *events));
    for (int number = 0; number < tokens; number++) {
        char word[32];
        snprintf(word, sizeof word, " word%d", number);
        append_text(&content, word);
        snprintf(json, sizeof json,
                 "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\","
                 "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s\"},\"finish_reason\":%s}]}",
                 word, number + 1 < tokens ? "null" : "\"length\"");
        append_chunk(&events[number], json);
    }
    append(&content, "", 1);
    snprintf(json, sizeof json,
             "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\","
             "\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":%d,\"total_tokens\":%d}}",
             tokens, tokens + 12);
    append_chunk(&events[tokens], json);
    append_chunk(&events[tokens], "[DONE]");
    append_text(&events[tokens], "0\r\n\r\n");
    append_text(&stream_head, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                              "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n");

    append_text(&body, "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\","
                       "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"");
    append_text(&body, content.bytes);
    snprintf(json, sizeof json,
             "\"},\"finish_reason\":\"length\"}],"
             "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":%d,\"total_tokens\":%d}}",
             tokens, tokens + 12);
    append_text(&body, json);
    append(&body, "", 1);
    whole_answer = answer("200 OK", "application/json", body.bytes);
    models_answer = answer("200 OK", "application/json",
                           "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,"
                           "\"owned_by\":\"mock\",\"max_model_len\":8192}]}");
    metrics_answer = answer("200 OK", "text/plain; version=0.0.4",
                            "vllm:num_requests_running{model_name=\"m\"} 0\n"
                            "vllm:num_requests_waiting{model_name=\"m\"} 0\n"
                            "vllm:kv_cache_usage_perc{model_name=\"m\"} 0.0\n");
    empty_answer = answer("200 OK", "application/json", "{}");
    not_found_answer = answer("404 Not Found", "application/json",
                              "{\"error\":{\"message\":\"no such endpoint\",\"type\":\"invalid_request_error\"}}");
}

/* -- the order in which streams are due --------------------------------------------------------------------------- */

static void stop_pacing(struct connection *connection)
{
    if (!connection->after)
        return;
    connection->before->after = connection->after;
    connection->after->before = connection->before;
    connection->before = connection->after = NULL;
}

/* Every stream has the same interval, so the place is at the end or a few streams before it. */
static void pace(struct connection *connection)
{
    struct connection *before = pacing.before;
    while (before != &pacing && before->due_ns > connection->due_ns)
        before = before->before;
    connection->before = before;
    connection->after = before->after;
    before->after->before = connection;
    before->after = connection;
}

static void arm_timer(void)
{
    uint64_t due = pacing.after == &pacing ? 0 : pacing.after->due_ns;
    struct itimerspec at = {.it_value = {.tv_sec = (time_t)(due / 1000000000u), .tv_nsec = (long)(due % 1000000000u)}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

/* -- connections -------------------------------------------------------------------------------------------------- */

static void watch(struct connection *connection, int operation, uint32_t what)
{
    struct epoll_event event = {.events = what, .data.ptr = connection};
    if (epoll_ctl(epoll_fd, operation, connection->fd, &event) < 0)
        die("epoll_ctl");
}

static void hang_up(struct connection *connection)
{
    stop_pacing(connection);
    close(connection->fd);
    free(connection->input.bytes);
    free(connection->output.bytes);
    free(connection);
}

/* Sends `output`; what the socket does not take now waits for EPOLLOUT. False: the peer is gone. */
static int flush(struct connection *connection)
{
    struct buffer *output = &connection->output;
    while (connection->sent < output->length) {
        ssize_t count = send(connection->fd, output->bytes + connection->sent, output->length - connection->sent, 0);
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
    connection->sent = output->length = 0;
    if (connection->is_blocked)
        watch(connection, EPOLL_CTL_MOD, EPOLLIN);
    connection->is_blocked = 0;
    return 1;
}

static int reply(struct connection *connection, const struct buffer *bytes)
{
    append(&connection->output, bytes->bytes, bytes->length);
    return connection->is_blocked || flush(connection);
}

/* Sends every event of the stream that is due. False: the peer is gone. */
static int continue_stream(struct connection *connection, uint64_t now)
{
    while (connection->next_event < tokens && connection->due_ns <= now) {
        if (!reply(connection, &events[connection->next_event++]))
            return 0;
        connection->due_ns += itl_ns;
    }
    if (connection->next_event < tokens) {
        pace(connection);
        return 1;
    }
    connection->is_streaming = 0;
    return reply(connection, &events[tokens]);
}

static int start_stream(struct connection *connection)
{
    uint64_t now = now_ns();
    connection->is_streaming = 1;
    connection->next_event = 0;
    connection->due_ns = now;
    append(&connection->output, stream_head.bytes, stream_head.length);
    return continue_stream(connection, now);
}

/* -- requests ----------------------------------------------------------------------------------------------------- */

/* Whether the body has the member "stream": true. Quotes inside of strings are escaped, so this is no text. */
static int wants_stream(const char *body, size_t length)
{
    const char *end = body + length, *at = body;
    while ((at = memmem(at, (size_t)(end - at), "\"stream\"", 8))) {
        at += 8;
        while (at < end && (*at == ' ' || *at == ':'))
            at++;
        if (end - at >= 4 && memcmp(at, "true", 4) == 0)
            return 1;
    }
    return 0;
}

static size_t content_length(const char *head)
{
    const char *field = strcasestr(head, "\r\ncontent-length:");
    return field ? strtoul(field + strlen("\r\ncontent-length:"), NULL, 10) : 0;
}

static int starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

static int handle(struct connection *connection, const char *head, const char *body, size_t length)
{
    if (starts_with(head, "POST /v1/chat/completions ") || starts_with(head, "POST /v1/completions "))
        return wants_stream(body, length) ? start_stream(connection) : reply(connection, &whole_answer);
    if (starts_with(head, "GET /v1/models "))
        return reply(connection, &models_answer);
    if (starts_with(head, "GET /metrics "))
        return reply(connection, &metrics_answer);
    return reply(connection, starts_with(head, "GET ") ? &empty_answer : &not_found_answer);
}

/* Answers the complete requests at the start of `input`, one after the other. False: hang up. */
static int handle_input(struct connection *connection)
{
    struct buffer *input = &connection->input;
    while (!connection->is_streaming && input->length) {
        char *blank = memmem(input->bytes, input->length, "\r\n\r\n", 4);
        if (!blank)
            return input->length <= MAX_HEAD_BYTES;
        size_t head_length = (size_t)(blank - input->bytes) + 4;
        char last = blank[3];
        blank[3] = 0; /* the head as a string */
        size_t length = content_length(input->bytes);
        blank[3] = last;
        if (input->length < head_length + length) {
            reserve(input, head_length + length);
            return 1;
        }
        if (!handle(connection, input->bytes, input->bytes + head_length, length))
            return 0;
        input->length -= head_length + length;
        memmove(input->bytes, input->bytes + head_length + length, input->length);
    }
    return 1;
}

/* False: hang up. */
static int read_input(struct connection *connection)
{
    struct buffer *input = &connection->input;
    for (;;) {
        reserve(input, input->length + READ_BYTES);
        size_t room = input->capacity - input->length;
        ssize_t count = recv(connection->fd, input->bytes + input->length, room, 0);
        if (count == 0 || (count < 0 && errno != EAGAIN))
            return 0;
        if (count > 0)
            input->length += (size_t)count;
        if (count < (ssize_t)room)
            return handle_input(connection);
    }
}

static void accept_all(void)
{
    int fd, on = 1;
    while ((fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct connection *connection = checked(calloc(1, sizeof *connection));
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        connection->fd = fd;
        watch(connection, EPOLL_CTL_ADD, EPOLLIN);
    }
}

static void serve_due_streams(void)
{
    uint64_t expirations, now = now_ns();
    if (read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
        die("read");
    while (pacing.after != &pacing && pacing.after->due_ns <= now) {
        struct connection *connection = pacing.after;
        stop_pacing(connection);
        if (!continue_stream(connection, now) || !handle_input(connection))
            hang_up(connection);
    }
}

/* -- the server --------------------------------------------------------------------------------------------------- */

static void start_listening(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct epoll_event listening = {.events = EPOLLIN, .data.ptr = &listen_fd};
    struct epoll_event timer = {.events = EPOLLIN, .data.ptr = &timer_fd};
    int on = 1;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listen_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listen_fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(listen_fd, 4096) < 0)
        die("listen");
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    epoll_fd = epoll_create1(0);
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listen_fd, &listening) < 0 ||
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &timer) < 0)
        die("epoll_ctl");
}

int main(int count, char **arguments)
{
    struct epoll_event ready[EPOLL_EVENTS];

    if (count > 2)
        tokens = atoi(arguments[2]);
    if (count > 3)
        itl_ns = strtoull(arguments[3], NULL, 10) * 1000u;
    if (count < 2 || count > 4 || tokens < 1 || tokens > MAX_TOKENS) {
        fprintf(stderr, "usage: mock_llm PORT [TOKENS [ITL_US]]; TOKENS from 1 to %d\n", MAX_TOKENS);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    make_answers();
    start_listening(atoi(arguments[1]));
    for (;;) {
        int number = epoll_wait(epoll_fd, ready, EPOLL_EVENTS, -1), is_due = 0;
        for (int index = 0; index < number; index++) {
            struct connection *connection = ready[index].data.ptr;
            uint32_t what = ready[index].events;
            if (ready[index].data.ptr == &listen_fd)
                accept_all();
            else if (ready[index].data.ptr == &timer_fd)
                is_due = 1;
            else if ((what & EPOLLOUT && !flush(connection)) || (what & ~(uint32_t)EPOLLOUT && !read_input(connection)))
                hang_up(connection);
        }
        /* After all input: a connection that hung up above must not be found in `ready` once more. */
        if (is_due)
            serve_due_streams();
        arm_timer();
    }
}
