/* Finds the end of a run of plain events. Does the same as the regular expression in sse.py, faster. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

static const char DATA[] = "data: ", MORE[] = "\"finish_reason\":null", ROLE[] = "\"role\":\"assistant\"";

#define LENGTH(name) ((Py_ssize_t)sizeof(name) - 1)

PyDoc_STRVAR(plain_run_doc,
    "scan_plain_events(events, /)\n--\n\n"
    "The end of the leading plain events (one line, no finish reason, no role), and their number.");

static PyObject *scan_plain_events(PyObject *module, PyObject *events)
{
    (void)module;
    if (!PyBytes_CheckExact(events)) {
        PyErr_SetString(PyExc_TypeError, "scan_plain_events() takes bytes");
        return NULL;
    }
    const char *start = PyBytes_AS_STRING(events), *end = start + PyBytes_GET_SIZE(events), *at = start;
    Py_ssize_t said = 0;
    while (end - at > LENGTH(DATA) && memcmp(at, DATA, LENGTH(DATA)) == 0) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        if (newline == NULL || end - newline < 2 || newline[1] != '\n')
            break;
        Py_ssize_t here = 0;
        for (const char *byte = at; newline - byte >= LENGTH(ROLE); byte++) {
            if (*byte != '"')
                continue;
            if (newline - byte >= LENGTH(MORE) && memcmp(byte, MORE, LENGTH(MORE)) == 0) {
                here++;
            } else if (memcmp(byte, ROLE, LENGTH(ROLE)) == 0) {
                here = 0;
                break;
            }
        }
        if (here == 0)
            break;
        said += here;
        at = newline + 2;
    }
    return Py_BuildValue("(nn)", (Py_ssize_t)(at - start), said);
}

static PyMethodDef methods[] = {{"scan_plain_events", scan_plain_events, METH_O, plain_run_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_sse_scan", "Runs of plain events.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__sse_scan(void)
{
    return PyModuleDef_Init(&definition);
}
