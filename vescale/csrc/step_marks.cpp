// What the checks of a script do in every step of a model: numbers for what a forward is given, the line of the program that
// runs it, and a hook before the backward.
//
// vescale/checks does the same in Python where this is not built. The numbers differ, so that all ranks have the one or the
// other; ranks that have both compare descriptions in every step. The interpreter's lock is held throughout.

#include "interpreter.h"
#include "value_digest.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <frameobject.h>

#include <utility>

namespace vescale {
namespace {

// Of an argument of a forward: of a constant a tuple with it, of others a number; strings in containers are names of what a
// rank was given, and do not count. A null object: values of other kinds.
py::object sampled(PyObject* value) {
    if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
        PyUnicode_CheckExact(value)) {
        return py::make_tuple(py::reinterpret_borrow<py::object>(value));
    }
    ValueDigest digest(false);
    return digest.add(value, 0) ? py::object(py::int_(digest.value())) : py::object();
}

// None: Python has to do it.
py::object sample(const py::tuple& args, const py::dict& kwargs) {
    py::tuple found(args.size());
    for (std::size_t i = 0; i < args.size(); ++i) {
        auto seen = sampled(args[i].ptr());
        if (!seen) {
            return py::none();
        }
        found[i] = std::move(seen);
    }
    py::dict named;
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs.ptr(), &at, &name, &value) != 0;) {
        const auto seen = sampled(value);
        if (!seen) {
            return py::none();
        }
        named[py::reinterpret_borrow<py::object>(name)] = seen;
    }
    return py::make_tuple(std::move(found), std::move(named));
}

py::object digest_of(const py::object& value) {
    ValueDigest digest(true);
    return digest.add(value.ptr(), 0) ? py::object(py::int_(digest.value())) : py::object(py::none());
}

// "train.py:37 (main)", the innermost line that is in none of the libraries; "": there is none. `known`: by file, whether it
// is one of a library; `find` tells it of others.
std::string call_site(const py::dict& known, const py::object& find) {
    auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    while (frame) {
        auto* running = reinterpret_cast<PyFrameObject*>(frame.ptr());
        const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(running)));
        const auto* line = reinterpret_cast<PyCodeObject*>(code.ptr());
        PyObject* is_of_a_library = PyDict_GetItemWithError(known.ptr(), line->co_filename);
        py::object found;
        if (is_of_a_library == nullptr) {
            if (PyErr_Occurred()) {
                throw python_error();
            }
            found = owned(PyObject_CallOneArg(find.ptr(), line->co_filename));
            is_of_a_library = found.ptr();
        }
        if (is_of_a_library == Py_False) {
            const std::string file = py::str(line->co_filename);
            return file.substr(file.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(running)) + " (" +
                   std::string(py::str(line->co_name)) + ")";
        }
        frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(running)));
    }
    return "";
}

// Calls Python before a node of a graph runs, without making its gradients Python objects.
class BeforeNode : public torch::autograd::FunctionPreHook {
  public:
    explicit BeforeNode(py::object call) : call_(std::move(call)) {}
    ~BeforeNode() override {
        if (!Py_IsInitialized()) {
            call_.release();
            return;
        }
        Gil gil;
        call_ = py::object();
    }

    torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
        Gil gil;
        owned(PyObject_CallNoArgs(call_.ptr()));
        return gradients;
    }

  private:
    py::object call_;
};

// Before the node that has made a tensor. Whether there is one.
bool before_backward(const py::object& tensor, py::object call) {
    TORCH_CHECK_TYPE(THPVariable_Check(tensor.ptr()), "expected a tensor");
    const auto& node = THPVariable_Unpack(tensor.ptr()).grad_fn();
    if (!node) {
        return false;
    }
    node->add_pre_hook(std::make_unique<BeforeNode>(std::move(call)));
    return true;
}

}  // namespace
}  // namespace vescale

PYBIND11_MODULE(_step_marks, module) {
    module.def("sample", &vescale::sample);
    module.def("digest_of", &vescale::digest_of);
    module.def("call_site", &vescale::call_site);
    module.def("before_backward", &vescale::before_backward);
}
