// The interpreter's lock, and new references to Python objects.

#pragma once

#include <torch/csrc/python_headers.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>

namespace vescale {

// The interpreter's lock, taken for a scope. Where this thread has it, as most do, only that is found out.
class Gil {
  public:
    Gil() : was_held_(is_held()) {
        if (!was_held_) {
            state_ = PyGILState_Ensure();
        }
    }
    ~Gil() {
        if (!was_held_) {
            PyGILState_Release(state_);
        }
    }
    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;

  private:
    static bool is_held() {  // PyGILState_Check answers yes where there are several interpreters
#if PY_VERSION_HEX >= 0x030D0000
        PyThreadState* current = PyThreadState_GetUnchecked();
#else
        PyThreadState* current = _PyThreadState_UncheckedGet();
#endif
        return current != nullptr && current == PyGILState_GetThisThreadState();
    }

    bool was_held_;
    PyGILState_STATE state_{};
};

// The interpreter's lock, given up for a scope if `is_wanted`.
class Unlocked {
  public:
    explicit Unlocked(bool is_wanted) : state_(is_wanted ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_ != nullptr) {
            PyEval_RestoreThread(state_);
        }
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

// Owns a reference that a function of Python's C interface has returned. Throws the Python error if it is null.
inline py::object owned(PyObject* made) {
    if (made == nullptr) {
        throw python_error();
    }
    return py::reinterpret_steal<py::object>(made);
}

// A tensor among the arguments of Python.
inline const at::Tensor& tensor_of(py::handle object) {
    TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "expected a tensor, and got ", Py_TYPE(object.ptr())->tp_name);
    return THPVariable_Unpack(object.ptr());
}

// One level of containers; raises where there are too many.
class Nested {
  public:
    Nested() {
        if (Py_EnterRecursiveCall(" in containers of containers") != 0) {
            throw python_error();
        }
    }
    ~Nested() { Py_LeaveRecursiveCall(); }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
};

// A function of Python's, which nobody has set yet.
inline void require(const py::object& function) {
    TORCH_CHECK(function, "the library is not installed");
}

// A method. What pybind11 makes of a member function takes None for the object.
template <class Class, class Result, class... Args>
auto method(Result (Class::*function)(Args...)) {
    return [function](Class& self, Args... args) -> Result {
        HANDLE_TH_ERRORS
        return (self.*function)(std::forward<Args>(args)...);
        END_HANDLE_TH_ERRORS_PYBIND
    };
}
template <class Class, class Result, class... Args>
auto method(Result (Class::*function)(Args...) const) {
    return [function](const Class& self, Args... args) -> Result {
        HANDLE_TH_ERRORS
        return (self.*function)(std::forward<Args>(args)...);
        END_HANDLE_TH_ERRORS_PYBIND
    };
}

// Classes are made by calling them: pybind11 gives an object of `Class.__new__(Class)` memory that nobody has set.
template <class Class>
Class made_by_calls(Class made) {
    const auto refuse = py::cpp_function(
        [](const py::args&, const py::kwargs&) { throw py::type_error("call the class"); }, py::name("__new__"));
    auto* type = reinterpret_cast<PyTypeObject*>(made.ptr());
    const auto method = owned(PyStaticMethod_New(refuse.ptr()));
    if (PyDict_SetItemString(type->tp_dict, "__new__", method.ptr()) != 0) {  // calls go by the slot, which stays
        throw python_error();
    }
    PyType_Modified(type);
    return made;
}

}  // namespace vescale
