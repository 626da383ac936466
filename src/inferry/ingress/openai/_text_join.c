/* Joins consecutive events that differ in their text only, by cutting out the bytes between two texts. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

/* The quote that ends a text; NULL where the line ends first. */
static const char *closing_quote(const char *at, const char *end)
{
    for (; at < end; at++) {
        if (*at == '"')
            return at;
        if (*at == '\n')
            return NULL;
        if (*at == '\\')
            at++;
    }
    return NULL;
}

PyDoc_STRVAR(join_texts_doc,
    "join_texts(raw, start, text, after, end, /)\n--\n\n"
    "Join the event from `start` to `end` with the events behind it that have the same bytes before and after their\n"
    "text. The text of the event is from `text` to `after`. Two newlines follow `end`, as every event.");

static PyObject *join_texts(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_ssize_t marks[4];
    if (count != 5 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "join_texts() takes bytes and four offsets");
        return NULL;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]);
    for (int i = 0; i < 4; i++) {
        marks[i] = PyLong_AsSsize_t(args[i + 1]);
        if (marks[i] == -1 && PyErr_Occurred())
            return NULL;
        if (marks[i] < (i ? marks[i - 1] : 0) || marks[i] > size) {
            PyErr_SetString(PyExc_ValueError, "the offsets are not those of an event");
            return NULL;
        }
    }
    const char *raw = PyBytes_AS_STRING(args[0]), *end = raw + size;
    const char *before = raw + marks[0], *after = raw + marks[2];
    size_t before_size = (size_t)(marks[1] - marks[0]), after_size = (size_t)(marks[3] - marks[2]);
    size_t between = after_size + 2 + before_size;
    PyObject *made = PyBytes_FromStringAndSize(NULL, size); /* the result is never longer */
    if (made == NULL)
        return NULL;
    char *to = PyBytes_AS_STRING(made);
    memcpy(to, raw, (size_t)marks[2]);
    to += marks[2];
    const char *at = after; /* the end of the last joined text */
    while ((size_t)(end - at) >= between && memcmp(at, after, after_size) == 0 && memcmp(at + after_size, "\n\n", 2) == 0
           && memcmp(at + after_size + 2, before, before_size) == 0) {
        const char *text = at + between, *closing = closing_quote(text, end);
        if (closing == NULL)
            break;
        memcpy(to, text, (size_t)(closing - text));
        to += closing - text;
        at = closing;
    }
    memcpy(to, at, (size_t)(end - at));
    to += end - at;
    if (_PyBytes_Resize(&made, to - PyBytes_AS_STRING(made)) < 0)
        return NULL;
    return made;
}

static PyMethodDef methods[] = {
    {"join_texts", (PyCFunction)(void (*)(void))join_texts, METH_FASTCALL, join_texts_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_text_join", "Events with their texts joined.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__text_join(void)
{
    return PyModuleDef_Init(&definition);
}
