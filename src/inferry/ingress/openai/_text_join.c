/* Events that differ in their text alone, as one event: without what stands between one text and the next. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

/* The quote that ends a text; NULL where a line ends before it. */
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
    "The same events, with those behind the one from `start` to `end` that have the same bytes before and after their\n"
    "text as one with it, for as long as there are such. Its text stands from `text` to `after`; behind `end`, as behind\n"
    "every event, stand two newlines.");

static PyObject *join_texts(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_ssize_t marks[4];
    if (count != 5 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "join_texts() takes bytes and four places in them");
        return NULL;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]);
    for (int i = 0; i < 4; i++) {
        marks[i] = PyLong_AsSsize_t(args[i + 1]);
        if (marks[i] == -1 && PyErr_Occurred())
            return NULL;
        if (marks[i] < (i ? marks[i - 1] : 0) || marks[i] > size) {
            PyErr_SetString(PyExc_ValueError, "these are no places of an event");
            return NULL;
        }
    }
    const char *raw = PyBytes_AS_STRING(args[0]), *end = raw + size;
    const char *before = raw + marks[0], *after = raw + marks[2];
    size_t before_size = (size_t)(marks[1] - marks[0]), after_size = (size_t)(marks[3] - marks[2]);
    size_t between = after_size + 2 + before_size;
    PyObject *made = PyBytes_FromStringAndSize(NULL, size); /* it never grows */
    if (made == NULL)
        return NULL;
    char *to = PyBytes_AS_STRING(made);
    memcpy(to, raw, (size_t)marks[2]);
    to += marks[2];
    const char *at = after; /* the end of a text that was taken */
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
