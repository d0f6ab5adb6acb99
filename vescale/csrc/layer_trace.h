// What a layer of a model did in a recorded forward, and whether others did the same: from which instructions torch functions
// were called, what they and modules were given and returned, and the placements of the gradients that arrived.

#pragma once

#include "dtensor.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace vescale {

// Equal placements as one object.
inline PyObject* placements_of(PyObject* dtensor, const py::object& known) {
    const auto held = owned(PyObject_GetAttrString(slot(dtensor, dtensor_class().spec_slot), "placements"));
    PyObject* found = PyDict_SetDefault(known.ptr(), held.ptr(), held.ptr());
    if (found == nullptr) {
        throw python_error();
    }
    return found;
}

// The placements of the gradients that arrived at tensors, sorted by address, for each tensor. Null: a plain gradient.
struct Arrivals {
    py::object placements;
    std::vector<std::vector<PyObject*>> of_tensors;

    static std::shared_ptr<Arrivals> make(py::object placements) {
        return {new Arrivals{std::move(placements), {}}, [](Arrivals* made) {  // by whoever frees the graph
                    const Gil gil;
                    delete made;
                }};
    }

    void note(std::size_t tensor, const at::Tensor& grad) {
        const Gil gil;
        auto& known = of_tensors[tensor];
        PyObject* dtensor = dtensor_of(grad);
        PyObject* arrived = dtensor == nullptr ? nullptr : placements_of(dtensor, placements);
        const auto place = std::lower_bound(known.begin(), known.end(), arrived);
        if (place == known.end() || *place != arrived) {
            known.insert(place, arrived);
        }
    }
};

// What traces have found out about functions and their instructions.
class KnownPlaces {
  public:
    using Place = std::array<int, 4>;  // first and last line, first and last column

    // `is_recorded`: of a file, whether its functions are the model's.
    bool is_recorded(const py::object& code, const py::object& is_recorded) {
        const auto found = recorded_.find(code.ptr());
        if (found != recorded_.end()) {
            return found->second;
        }
        const auto file = reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename;
        const bool result = owned(PyObject_CallOneArg(is_recorded.ptr(), file)).ptr() == Py_True;
        held_.push_back(code);  // so that no other code gets the address
        return recorded_.emplace(code.ptr(), result).first->second;
    }

    // Where an instruction is, in a function that `is_recorded` was asked about: its offset depends on how it is specialized.
    const Place& of(const py::object& code, int offset) {
        const auto [found, is_new] = places_.try_emplace({code.ptr(), offset});
        if (is_new) {
            auto& [line, last_line, column, last_column] = found->second;
            const auto held = reinterpret_cast<PyCodeObject*>(code.ptr());
            PyCode_Addr2Location(held, offset, &line, &column, &last_line, &last_column);
        }
        return found->second;
    }

  private:
    std::unordered_map<PyObject*, bool> recorded_;
    std::map<std::pair<PyObject*, int>, Place> places_;
    std::vector<py::object> held_;
};

// Numbers, and objects in between. The objects are in a list of Python's, so that its garbage collector sees what they hold;
// it is passed to each call.
//
// Tensors are numbered as they first come, so that values went the same ways. The first time they come with placements,
// sizes, strides, and the name in the layer if they are parameters.
class LayerTrace {
  public:
    // `frame`: of the function that calls the layer. `prefix`: of names in it. `placements`: a dictionary, for equal
    // placements. `like`: the trace, with its objects, that this one is compared with as it grows; null: it is kept itself.
    LayerTrace(const py::object& frame, std::string prefix, const py::dict& placements, std::shared_ptr<LayerTrace> like)
        : outermost_(reinterpret_cast<PyFrameObject*>(frame.ptr())), prefix_(std::move(prefix)), like_(std::move(like)),
          known_(like_ == nullptr ? std::make_shared<KnownPlaces>() : like_->known_), arrivals_(Arrivals::make(placements)) {}

    // After a call. `names`: of parameters and buffers, by id. `is_recorded`: of a file, whether its functions are the model's.
    void note(
        const py::list& objects, const py::object& called, const py::object& given, const py::object& returned,
        const py::dict& names, const py::object& is_recorded) {
        if (!differs_) {
            Step step{objects, names};
            add_places(step, is_recorded);
            add_object(step, called.ptr(), false);
            add(step, given.ptr());
            add(step, returned.ptr());
        }
    }

    // After the forward of the layer.
    void end(const py::list& objects) {
        numbers_of_.clear();
        held_.clear();
        outermost_ = nullptr;
        if (like_ != nullptr) {
            differs_ |= at_ != like_->numbers_.size() || at_object_ != PyList_GET_SIZE(objects.ptr());
        }
    }

    // After the backward: whether anything was other than in the trace that this one is compared with.
    bool differs() const {
        return differs_ || (like_ != nullptr && arrivals_->of_tensors != like_->arrivals_->of_tensors);
    }

  private:
    enum Kind : std::int64_t { kOther = -8, kFloat, kValue, kSequence, kDict, kSlice, kTensor, kPlainTensor };

    struct Step {
        const py::list& objects;
        const py::dict& names;
    };

    void add(std::int64_t number) {
        if (like_ == nullptr) {
            numbers_.push_back(number);
        } else {
            differs_ |= at_ >= like_->numbers_.size() || like_->numbers_[at_] != number;
            at_ += 1;
        }
    }

    void add(c10::IntArrayRef numbers) {
        add(static_cast<std::int64_t>(numbers.size()));
        for (const auto number : numbers) {
            add(number);
        }
    }

    void add_object(const Step& step, PyObject* object, bool by_identity) {
        if (like_ == nullptr) {
            if (PyList_Append(step.objects.ptr(), object) < 0) {
                throw python_error();
            }
            return;
        }
        const auto at = at_object_++;
        if (differs_ || at >= PyList_GET_SIZE(step.objects.ptr())) {
            differs_ = true;
            return;
        }
        const auto known = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(step.objects.ptr(), at));
        if (known.ptr() == object) {
            return;
        }
        const bool may_be_equal = !by_identity && Py_TYPE(known.ptr()) == Py_TYPE(object);
        const int is_equal = may_be_equal ? PyObject_RichCompareBool(known.ptr(), object, Py_EQ) : 0;
        if (is_equal < 0) {
            throw python_error();
        }
        differs_ |= is_equal == 0;
    }

    // Where the layer's own functions are.
    void add_places(const Step& step, const py::object& is_recorded) {
        py::object held;
        std::int64_t count = 0;
        for (PyFrameObject* running = PyEval_GetFrame(); running != nullptr && running != outermost_;) {
            const auto code = owned(reinterpret_cast<PyObject*>(PyFrame_GetCode(running)));
            if (known_->is_recorded(code, is_recorded)) {
                for (const int part : known_->of(code, PyFrame_GetLasti(running))) {
                    add(static_cast<std::int64_t>(part));
                }
                add_object(step, code.ptr(), true);
                count += 1;
            }
            held = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(running)));
            running = reinterpret_cast<PyFrameObject*>(held.ptr());
        }
        add(count);
    }

    // Containers, slices, numbers, flags and texts by what they are, other objects by identity.
    void add(const Step& step, PyObject* value) {
        if (differs_) {
            return;
        }
        if (THPVariable_Check(value)) {
            add_tensor(step, value);
        } else if (PyFloat_CheckExact(value)) {  // by its bits
            const double number = PyFloat_AS_DOUBLE(value);
            std::int64_t bits = 0;
            std::memcpy(&bits, &number, sizeof bits);
            add(kFloat);
            add(bits);
        } else if (is_plain(value)) {
            add(kValue);
            add_object(step, value, false);
        } else if (PyList_Check(value) || PyTuple_Check(value)) {
            add(kSequence);
            add_object(step, reinterpret_cast<PyObject*>(Py_TYPE(value)), true);
            add(static_cast<std::int64_t>(PySequence_Fast_GET_SIZE(value)));
            for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
                add(step, PySequence_Fast_GET_ITEM(value, i));
            }
        } else if (PyDict_Check(value)) {
            add(kDict);
            add_object(step, reinterpret_cast<PyObject*>(Py_TYPE(value)), true);
            add(static_cast<std::int64_t>(PyDict_GET_SIZE(value)));
            PyObject *key, *item;
            for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) {
                add_object(step, key, false);
                add(step, item);
            }
        } else if (PySlice_Check(value)) {
            const auto* slice = reinterpret_cast<PySliceObject*>(value);
            add(kSlice);
            add(step, slice->start);
            add(step, slice->stop);
            add(step, slice->step);
        } else {
            add(kOther);
            add_object(step, value, true);
        }
    }

    static bool is_plain(PyObject* value) {
        return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyUnicode_CheckExact(value) ||
            PyBytes_CheckExact(value) || PyComplex_CheckExact(value) || Py_TYPE(value) == &PyRange_Type ||
            THPDtype_Check(value) || THPDevice_Check(value);
    }

    void add_tensor(const Step& step, PyObject* object) {
        const at::Tensor& x = THPVariable_Unpack(object);
        const auto [found, is_new] = numbers_of_.emplace(x.unsafeGetTensorImpl(), static_cast<std::int64_t>(held_.size()));
        add(found->second);
        if (!is_new) {
            return;
        }
        held_.push_back(x);  // so that no other tensor gets the address
        PyObject* dtensor = dtensor_of(x);
        add(dtensor == nullptr ? kPlainTensor : kTensor);
        add(static_cast<std::int64_t>(x.scalar_type()));
        add(static_cast<std::int64_t>(x.requires_grad()));
        add(x.sizes());
        if (dtensor == nullptr) {
            add(x.layout() == at::kStrided ? x.strides() : c10::IntArrayRef());
            return;
        }
        const at::Tensor& local = local_of(dtensor);
        add(local.sizes());
        add(local.strides());
        add_object(step, placements_of(dtensor, arrivals_->placements), true);
        add_name(step, object);
        if (x.requires_grad() && !x.is_leaf()) {
            const auto number = arrivals_->of_tensors.size();
            arrivals_->of_tensors.emplace_back();
            x.register_hook([arrivals = arrivals_, number](const at::Tensor& grad) { arrivals->note(number, grad); });
        }
    }

    // Of a parameter or a buffer of the layer, as it is called there.
    void add_name(const Step& step, PyObject* tensor) {
        const auto id = owned(PyLong_FromVoidPtr(tensor));
        PyObject* name = PyDict_GetItemWithError(step.names.ptr(), id.ptr());
        if (name == nullptr) {
            add(0);
            return;
        }
        const std::string text = py::str(py::handle(name));
        const bool is_own = text.compare(0, prefix_.size(), prefix_) == 0;
        add(1);
        add_object(step, py::str(is_own ? text.substr(prefix_.size()) : text).ptr(), false);
    }

    PyFrameObject* outermost_;  // where a search ends; it runs as long as the layer, and is not looked into
    std::string prefix_;
    std::shared_ptr<LayerTrace> like_;
    std::shared_ptr<KnownPlaces> known_;
    std::shared_ptr<Arrivals> arrivals_;
    std::vector<std::int64_t> numbers_;  // of a trace that is kept
    std::size_t at_ = 0;  // in those of the other trace
    Py_ssize_t at_object_ = 0;
    std::unordered_map<const c10::TensorImpl*, std::int64_t> numbers_of_;  // of tensors, while the layer runs
    std::vector<at::Tensor> held_;
    bool differs_ = false;
};

}  // namespace vescale
