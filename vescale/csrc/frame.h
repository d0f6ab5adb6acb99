// A running module: a Python object with the attributes of `Frame` in vescale/runtime/_activation.py.

#pragma once

#include "interpreter.h"

#include <structmember.h>

namespace vescale {

struct Frame {
    PyObject_HEAD
    PyObject* module;
    PyObject* path;
    PyObject* args;  // of the forward
    PyObject* kwargs;
    PyObject* compiler;  // null: None
    PyObject* results;  // a list, and a dictionary: null until somebody asks for them
    PyObject* converted;
    PyObject* where;
    PyObject* placed;  // null: None

    static PyTypeObject* type;

    static PyObject* make(PyObject* module, PyObject* path, PyObject* args, PyObject* kwargs, PyObject* where) {
        Frame* frame = PyObject_GC_New(Frame, type);
        if (frame == nullptr) {
            throw python_error();
        }
        frame->module = Py_NewRef(module);
        frame->path = Py_NewRef(path);
        frame->args = Py_NewRef(args);
        frame->kwargs = Py_NewRef(kwargs);
        frame->where = Py_NewRef(where);
        frame->compiler = frame->results = frame->converted = frame->placed = nullptr;
        PyObject_GC_Track(frame);
        return reinterpret_cast<PyObject*>(frame);
    }

    static int clear(PyObject* object) {
        auto* self = reinterpret_cast<Frame*>(object);
        Py_CLEAR(self->module);
        Py_CLEAR(self->path);
        Py_CLEAR(self->args);
        Py_CLEAR(self->kwargs);
        Py_CLEAR(self->compiler);
        Py_CLEAR(self->results);
        Py_CLEAR(self->converted);
        Py_CLEAR(self->where);
        Py_CLEAR(self->placed);
        return 0;
    }

    static int traverse(PyObject* object, visitproc visit, void* arg) {
        auto* self = reinterpret_cast<Frame*>(object);
        for (PyObject* held :
             {reinterpret_cast<PyObject*>(Py_TYPE(object)), self->module, self->args, self->kwargs, self->compiler, self->results,
              self->converted, self->where, self->placed}) {
            Py_VISIT(held);
        }
        return 0;
    }

    static void dealloc(PyObject* object) {
        PyTypeObject* held = Py_TYPE(object);
        PyObject_GC_UnTrack(object);
        clear(object);
        PyObject_GC_Del(object);
        Py_DECREF(held);
    }

    static PyObject* get_results(PyObject* object, void*) {
        auto* self = reinterpret_cast<Frame*>(object);
        if (self->results == nullptr) {
            self->results = PyList_New(0);
        }
        return Py_XNewRef(self->results);
    }

    static PyObject* get_converted(PyObject* object, void*) {
        auto* self = reinterpret_cast<Frame*>(object);
        if (self->converted == nullptr) {
            self->converted = PyDict_New();
        }
        return Py_XNewRef(self->converted);
    }

    static void ready() {
        static PyMemberDef members[] = {
            {"module", T_OBJECT_EX, offsetof(Frame, module), READONLY, nullptr},
            {"path", T_OBJECT_EX, offsetof(Frame, path), READONLY, nullptr},
            {"args", T_OBJECT_EX, offsetof(Frame, args), READONLY, nullptr},
            {"kwargs", T_OBJECT_EX, offsetof(Frame, kwargs), READONLY, nullptr},
            {"compiler", T_OBJECT, offsetof(Frame, compiler), READONLY, nullptr},
            {"where", T_OBJECT_EX, offsetof(Frame, where), READONLY, nullptr},
            {"placed", T_OBJECT, offsetof(Frame, placed), READONLY, nullptr},
            {nullptr, 0, 0, 0, nullptr}};
        static PyGetSetDef properties[] = {
            {"results", get_results, nullptr, nullptr, nullptr},
            {"converted", get_converted, nullptr, nullptr, nullptr},
            {nullptr, nullptr, nullptr, nullptr, nullptr}};
        static PyType_Slot slots[] = {
            {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
            {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
            {Py_tp_clear, reinterpret_cast<void*>(clear)},
            {Py_tp_members, members},
            {Py_tp_getset, properties},
            {0, nullptr}};
        static PyType_Spec spec = {
            "vescale.csrc._module_hooks.Frame", sizeof(Frame), 0,
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
        type = reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
    }
};

inline PyTypeObject* Frame::type = nullptr;

}  // namespace vescale
