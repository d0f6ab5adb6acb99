// What the checks of a script do in every step of a model: a number for what a forward is given, the line of the program that
// runs it, this rank's marks in shared memory, and a hook before the backward.
//
// vescale/checks does the same in Python where this is not built. The numbers differ, so that all ranks of a host have the one
// or the other; ranks that have both compare descriptions in every step. The interpreter's lock is held throughout.

#include "board_row.h"
#include "interpreter.h"
#include "value_digest.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <frameobject.h>

#include <utility>

namespace vescale {
namespace {

// Of what a forward is given: strings in containers are names of what a rank was given, and do not count.
py::object sample(const py::tuple& args, const py::dict& kwargs) {
    ValueDigest digest(false);
    for (const auto value : args) {
        if (!digest.add(value.ptr(), 0)) {
            return py::none();
        }
    }
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs.ptr(), &at, &name, &value) != 0;) {
        if (!digest.add(name, 0) || !digest.add(value, 0)) {
            return py::none();
        }
    }
    return py::int_(digest.value());
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

// Forwards of models and their backwards, posted to a board as vescale/checks/_steps.py does it: the same marks and texts.
class Steps {
  public:
    // `known` and `find`: as of `call_site`.
    Steps(py::object row, py::dict known, py::object find)
        : row_(std::move(row)), board_(&row_.cast<BoardRow&>()), known_(std::move(known)), find_(std::move(find)) {}

    // What it is, where other ranks have not posted the same yet, and "" where they have. None: Python has to do it (values
    // of other kinds, modes that see ops, autocast, which is a part of the text), and nothing is posted.
    py::object forward(std::uint64_t number, std::uint64_t count, const std::string& model, const std::string& mode,
                       std::uint64_t model_number, const py::tuple& args, const py::dict& kwargs) {
        if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
            return py::none();
        }
        for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
            if (at::autocast::is_autocast_enabled(device)) {
                return py::none();
            }
        }
        const auto seen = sample(args, kwargs);
        if (seen.is_none()) {
            return py::none();
        }
        return post(number, "forward " + std::to_string(count) + " of " + model + ", " + mode, model_number, seen, true);
    }

    py::object backward(std::uint64_t number, std::uint64_t count, const std::string& model, std::uint64_t model_number) {
        return post(number, "the backward of forward " + std::to_string(count) + " of " + model, model_number, py::none(),
                    false);
    }

  private:
    py::object post(std::uint64_t number, const std::string& site, std::uint64_t model_number, const py::object& seen,
                    bool names_line) {
        ValueDigest digest(true);
        const auto all = py::make_tuple(site, model_number, py::tuple(), seen);
        TORCH_INTERNAL_ASSERT(digest.add(all.ptr(), 0));
        const std::string line = names_line ? call_site(known_, find_) : std::string();
        const auto is_same = board_->post(number, 0, digest.value(), 0, 0, line.empty() ? site : site + " (" + line + ")");
        return py::str(is_same ? std::string() : site);
    }

    py::object row_;
    BoardRow* board_;  // of row_
    py::dict known_;
    py::object find_;
};

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
    using vescale::BoardRow;
    module.def("sample", &vescale::sample);
    module.def("digest_of", &vescale::digest_of);
    module.def("call_site", &vescale::call_site);
    module.def("before_backward", &vescale::before_backward);
    using vescale::made_by_calls;
    made_by_calls(py::class_<BoardRow>(module, "BoardRow"))
        .def(py::init<const py::buffer&, std::size_t, std::vector<std::vector<std::size_t>>, std::size_t, std::size_t,
                      std::size_t>())
        .def("post", vescale::method(&BoardRow::post));
    made_by_calls(py::class_<vescale::Steps>(module, "Steps"))
        .def(py::init<py::object, py::dict, py::object>())
        .def("forward", vescale::method(&vescale::Steps::forward))
        .def("backward", vescale::method(&vescale::Steps::backward));
}
