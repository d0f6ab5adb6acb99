// The call of a module that has no hooks but those of its parallelized model: what nn.Module does then, without its Python.
//
// Set as the module's `_compiled_call_impl`, which nn.Module calls in place of `_call_impl` where there is one. With other
// hooks, of the module or of all modules, and while something is traced, it calls `call_module`.

#pragma once

#include "vectorcall.h"

#include <torch/csrc/jit/frontend/tracer.h>

namespace vescale {

struct ModuleCall {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* module;
    PyObject* before;
    PyObject* after;

    struct Python {
        py::object hooks_of_all;  // a tuple of dictionaries
        py::object run_hooks;  // (module, args, kwargs, output) -> output: all forward hooks, where the forward has added some
        py::object fail;  // (module, args, kwargs, after, error): runs `after`, and raises the error again
        py::object call;  // (module, args, kwargs): all hooks of the module, and its forward
        py::object forward = owned(PyUnicode_InternFromString("forward"));
        py::object forward_pre_hooks = owned(PyUnicode_InternFromString("_forward_pre_hooks"));
        py::object forward_hooks = owned(PyUnicode_InternFromString("_forward_hooks"));
        py::object backward_pre_hooks = owned(PyUnicode_InternFromString("_backward_pre_hooks"));
        py::object backward_hooks = owned(PyUnicode_InternFromString("_backward_hooks"));
    };

    static Python& python() {
        static auto* made = new Python;
        return *made;
    }

    // Whether the dictionary has this value alone; null: whether it is empty.
    static bool holds(PyObject* dict, PyObject* only) {
        if (dict == nullptr || !PyDict_Check(dict) || PyDict_Size(dict) != (only != nullptr)) {
            return false;
        }
        Py_ssize_t at = 0;
        PyObject* value = nullptr;
        return only == nullptr || (PyDict_Next(dict, &at, nullptr, &value) && value == only);
    }

    bool has_own_hooks_only() const {
        const auto& names = python();
        require(names.hooks_of_all);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names.hooks_of_all.ptr()); ++i) {
            if (!holds(PyTuple_GET_ITEM(names.hooks_of_all.ptr(), i), nullptr)) {
                return false;
            }
        }
        PyObject** dict = _PyObject_GetDictPtr(module);
        if (dict == nullptr || *dict == nullptr) {
            return false;
        }
        const auto get = [&](const py::object& name) { return PyDict_GetItem(*dict, name.ptr()); };
        return holds(get(names.forward_pre_hooks), before) && holds(get(names.forward_hooks), after) &&
            holds(get(names.backward_pre_hooks), nullptr) && holds(get(names.backward_hooks), nullptr);
    }

    static PyObject* vectorcall(PyObject* self, PyObject* const* given, std::size_t num_given, PyObject* named) {
        HANDLE_TH_ERRORS
        return reinterpret_cast<ModuleCall*>(self)->run(given, PyVectorcall_NARGS(num_given), named);
        END_HANDLE_TH_ERRORS
    }

    PyObject* run(PyObject* const* given, Py_ssize_t num_args, PyObject* named) const {
        auto [args, kwargs] = packed_arguments(given, num_args, named);
        if (!has_own_hooks_only() || torch::jit::tracer::isTracing()) {
            return PyObject_CallFunctionObjArgs(python().call.ptr(), module, args.ptr(), kwargs.ptr(), nullptr);
        }
        const auto held_after = py::reinterpret_borrow<py::object>(after);
        PyObject* enter_args[] = {module, args.ptr(), kwargs.ptr()};
        PyObject* entered = PyObject_Vectorcall(before, enter_args, 3, nullptr);
        PyObject* result = nullptr;
        if (entered != nullptr) {
            const auto placed = owned(entered);
            if (!placed.is_none()) {
                TORCH_CHECK_TYPE(
                    PyTuple_Check(placed.ptr()) && PyTuple_GET_SIZE(placed.ptr()) == 2 && PyTuple_Check(PyTuple_GET_ITEM(placed.ptr(), 0)) &&
                        PyDict_Check(PyTuple_GET_ITEM(placed.ptr(), 1)),
                    "expected a tuple and a dictionary");
                args = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(placed.ptr(), 0));
                kwargs = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(placed.ptr(), 1));
            }
            PyObject* forward = PyObject_GetAttr(module, python().forward.ptr());
            if (forward != nullptr) {
                result = PyObject_Call(owned(forward).ptr(), args.ptr(), kwargs.ptr());
            }
        }
        if (result == nullptr) {
            return failed(args, kwargs, held_after);
        }
        const auto output = owned(result);
        if (!has_own_hooks_only()) {
            return PyObject_CallFunctionObjArgs(
                python().run_hooks.ptr(), module, args.ptr(), kwargs.ptr(), output.ptr(), nullptr);
        }
        PyObject* leave_args[] = {module, args.ptr(), kwargs.ptr(), output.ptr()};
        const auto changed = owned(PyObject_Vectorcall(held_after.ptr(), leave_args, 4, nullptr));
        return Py_NewRef(changed.is_none() ? output.ptr() : changed.ptr());
    }

    PyObject* failed(const py::object& args, const py::object& kwargs, const py::object& held_after) const {
        PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        if (traceback != nullptr) {
            PyException_SetTraceback(value, traceback);
        }
        const auto error = py::reinterpret_steal<py::object>(value);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        return PyObject_CallFunctionObjArgs(
            python().fail.ptr(), module, args.ptr(), kwargs.ptr(), held_after.ptr(), error.ptr(), nullptr);
    }

    static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
        HANDLE_TH_ERRORS
        PyObject *module, *before, *after;
        static const char* keywords[] = {"module", "before", "after", nullptr};
        if (PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", const_cast<char**>(keywords), &module, &before, &after) == 0) {
            return nullptr;
        }
        const auto made = owned(type->tp_alloc(type, 0));
        auto* self = reinterpret_cast<ModuleCall*>(made.ptr());
        self->call = vectorcall;
        self->module = Py_NewRef(module);
        self->before = Py_NewRef(before);
        self->after = Py_NewRef(after);
        return made.inc_ref().ptr();
        END_HANDLE_TH_ERRORS
    }

    static int clear(PyObject* object) {
        auto* self = reinterpret_cast<ModuleCall*>(object);
        Py_CLEAR(self->module);
        Py_CLEAR(self->before);
        Py_CLEAR(self->after);
        return 0;
    }

    static int traverse(PyObject* object, visitproc visit, void* arg) {
        auto* self = reinterpret_cast<ModuleCall*>(object);
        Py_VISIT(Py_TYPE(object));
        Py_VISIT(self->module);
        Py_VISIT(self->before);
        Py_VISIT(self->after);
        return 0;
    }

    static void dealloc(PyObject* object) {
        PyTypeObject* type = Py_TYPE(object);
        PyObject_GC_UnTrack(object);
        clear(object);
        type->tp_free(object);
        Py_DECREF(type);
    }

    static py::object type() { return vectorcall_type<ModuleCall>("vescale.csrc._module_hooks.ModuleCall"); }
};

inline void set_call_functions(py::tuple hooks_of_all, py::object run_hooks, py::object fail, py::object call) {
    ModuleCall::python().hooks_of_all = std::move(hooks_of_all);
    ModuleCall::python().run_hooks = std::move(run_hooks);
    ModuleCall::python().fail = std::move(fail);
    ModuleCall::python().call = std::move(call);
}

}  // namespace vescale
