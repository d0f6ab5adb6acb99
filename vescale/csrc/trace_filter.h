// Following the functions of a model in Python, where most functions that run are the runtime's and PyTorch's.

#pragma once

#include "interpreter.h"

#include <frameobject.h>

#include <unordered_map>

namespace vescale {

// In front of a trace function of Python's: of calls, it sees those of functions in some files alone.
class TraceFilter {
  public:
    // `wants`: whether the functions of a file are followed. Of this thread's trace function, which stays in use.
    explicit TraceFilter(py::object wants) : wants_(std::move(wants)) {
        const PyThreadState* thread = PyThreadState_Get();
        next_ = thread->c_tracefunc;
        next_object_ = py::reinterpret_borrow<py::object>(thread->c_traceobj);
    }

    // Returns 0, or -1 with a Python error.
    int see(PyFrameObject* frame, int event, PyObject* value) {
        if (next_ == nullptr || (event == PyTrace_CALL && !is_wanted(frame))) {
            return PyErr_Occurred() != nullptr ? -1 : 0;
        }
        return next_(next_object_.ptr(), frame, event, value);
    }

    // As a trace function in Python, for who gets it by `sys.gettrace`.
    PyObject* call(PyObject* args) { return PyObject_Call(next_object_.ptr(), args, nullptr); }

  private:
    bool is_wanted(PyFrameObject* frame) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        const auto file = py::reinterpret_borrow<py::object>(code->co_filename);
        Py_DECREF(code);
        const auto found = known_.find(file.ptr());
        if (found != known_.end()) {
            return found->second.second;
        }
        PyObject* answer = PyObject_CallOneArg(wants_.ptr(), file.ptr());
        const bool is_wanted = answer == Py_True;
        Py_XDECREF(answer);
        if (answer != nullptr) {
            known_.emplace(file.ptr(), std::make_pair(file, is_wanted));
        }
        return is_wanted;
    }

    py::object wants_;
    Py_tracefunc next_;
    py::object next_object_;
    std::unordered_map<PyObject*, std::pair<py::object, bool>> known_;  // by the address of a file's name, which is held
};

inline TraceFilter& filter_in(PyObject* capsule) {
    return *static_cast<TraceFilter*>(PyCapsule_GetPointer(capsule, nullptr));
}

inline int see_event(PyObject* function, PyFrameObject* frame, int event, PyObject* value) {
    return filter_in(PyCFunction_GET_SELF(function)).see(frame, event, value);
}

inline PyObject* call_filter(PyObject* capsule, PyObject* args) {
    return filter_in(capsule).call(args);
}

// Puts a filter in front of the trace function of this thread; `sys.settrace` takes both away.
inline void filter_trace(py::object wants) {
    static PyMethodDef method{"filtered_trace", call_filter, METH_VARARGS, nullptr};
    const py::capsule held(
        new TraceFilter(std::move(wants)), [](void* filter) { delete static_cast<TraceFilter*>(filter); });
    const auto function = owned(PyCFunction_New(&method, held.ptr()));
    PyEval_SetTrace(see_event, function.ptr());
}

}  // namespace vescale
