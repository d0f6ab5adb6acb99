// Inputs and outputs of modules that the plan's entries bring elsewhere, where it is known what becomes of them.
//
// An entry (a `Placing` of vescale/runtime/_placing.py) asks Python once for each spec. From then on, DTensors with this spec are
// converted here: inputs where nothing moves, and an output of one DTensor. Everything else is placed by Python, with the same
// results: plain tensors, inputs that data move for (writes to them have to be followed), unknown containers, and all calls
// while somebody records.

#pragma once

#include "boundary_functions.h"
#include "dtensor.h"

#include <ATen/core/grad_mode.h>

#include <memory>
#include <optional>
#include <vector>

namespace vescale {

class BoundaryEntry {
  public:
    // `given`: (name or None, position or -1, way): which input it is for; neither: all that no other entry is for.
    // `way`: (DTensor) -> (spec, target, stages, requester, outdated, sharing), see Placing.way.
    explicit BoundaryEntry(const py::tuple& given)
        : name_(given[0]), position_(given[1].cast<Py_ssize_t>()), ask_(given[2]) {}

    bool is_rest() const { return name_.is_none() && position_ < 0; }

    bool is_for(PyObject* name) const { return !name_.is_none() && PyObject_RichCompareBool(name_.ptr(), name, Py_EQ) == 1; }
    bool is_for(Py_ssize_t position) const { return position_ == position; }

    // An input where nothing moves; null: Python places it. `converted`: what was converted in the calling module.
    py::object pass(PyObject* value, const py::object& converted) {
        if (is_plain_value(value)) {
            return py::reinterpret_borrow<py::object>(value);
        }
        if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
            return pass_items(value, converted);
        }
        if (Py_TYPE(value) != dtensor_class().type || !has_local(value)) {
            return {};
        }
        const auto way = way_of(value);
        if (way->target.is_none()) {  // DTensors stay as they are
            return py::reinterpret_borrow<py::object>(value);
        }
        if (way->sharing.is_none()) {
            return pass_once(value, *way);
        }
        const auto& tensor = THPVariable_Unpack(value);
        if (tensor.is_inference()) {
            return {};
        }
        const auto id = owned(PyLong_FromVoidPtr(value));
        const auto key = owned(PyTuple_Pack(3, id.ptr(), way->sharing.ptr(), at::GradMode::is_enabled() ? Py_True : Py_False));
        PyObject* held = PyDict_GetItemWithError(converted.ptr(), key.ptr());
        if (held == nullptr && PyErr_Occurred()) {
            throw python_error();
        }
        if (held != nullptr) {
            const auto result = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(held, 1));
            const int is_same = PyObject_RichCompareBool(PyTuple_GET_ITEM(held, 2), state(value, result.ptr()).ptr(), Py_EQ);
            if (is_same < 0) {
                throw python_error();
            }
            if (is_same == 1) {
                return result;
            }
        }
        auto result = pass_once(value, *way);
        if (result) {
            const auto entry = owned(PyTuple_Pack(3, value, result.ptr(), state(value, result.ptr()).ptr()));
            if (PyDict_SetItem(converted.ptr(), key.ptr(), entry.ptr()) != 0) {
                throw python_error();
            }
        }
        return result;
    }

    // An output; null: Python places it.
    py::object convert(PyObject* value) {
        if (Py_TYPE(value) != dtensor_class().type || !has_local(value)) {
            return {};
        }
        const auto way = way_of(value);
        if (way->target.is_none()) {
            return py::reinterpret_borrow<py::object>(value);
        }
        PyObject* made = boundary_functions()->convert(
            value, way->target.ptr(), way->stages.ptr(), way->requester.ptr(), way->outdated.ptr());
        return py::reinterpret_steal<py::object>(made);
    }

    int traverse(visitproc visit, void* arg) const {
        Py_VISIT(ask_.ptr());
        for (const auto& way : ways_) {
            for (const auto* held : {&way->spec, &way->target, &way->stages, &way->outdated, &way->sharing}) {
                Py_VISIT(held->ptr());
            }
        }
        return 0;
    }

  private:
    struct Way {
        py::object spec, target, stages, requester, outdated, sharing;
    };
    static constexpr std::size_t kMaxWays = 8;  // a module usually gets tensors with one spec

    static bool is_plain_value(PyObject* value) {
        return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
            PyUnicode_CheckExact(value);
    }

    py::object pass_items(PyObject* value, const py::object& converted) {
        const Nested nested;
        const bool is_tuple = PyTuple_CheckExact(value);
        const auto before = owned(PySequence_Tuple(value));
        const auto after = owned(PyTuple_New(PyTuple_GET_SIZE(before.ptr())));
        bool is_changed = false;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(before.ptr()); ++i) {
            PyObject* item = PyTuple_GET_ITEM(before.ptr(), i);
            auto placed = pass(item, converted);
            if (!placed) {
                return {};
            }
            is_changed |= placed.ptr() != item;
            PyTuple_SET_ITEM(after.ptr(), i, placed.release().ptr());
        }
        if (!is_changed) {
            return py::reinterpret_borrow<py::object>(value);
        }
        return is_tuple ? after : owned(PySequence_List(after.ptr()));
    }

    static py::object pass_once(PyObject* value, const Way& way) {
        return py::reinterpret_steal<py::object>(
            boundary_functions()->pass(value, way.target.ptr(), way.stages.ptr(), way.requester.ptr()));
    }

    // As `_state` of vescale/runtime/_placing.py.
    static py::object state(PyObject* x, PyObject* result) {
        const auto version = [](const at::Tensor& tensor) {
            return tensor.is_inference() ? 0L : static_cast<long>(tensor._version());
        };
        const auto& one = THPVariable_Unpack(x);
        const auto& other = THPVariable_Unpack(result);
        return py::make_tuple(
            version(one), version(local_of(x)), version(other), version(local_of(result)), one.requires_grad(),
            owned(PyLong_FromVoidPtr(slot(x, dtensor_class().local_slot))));
    }

    std::shared_ptr<const Way> way_of(PyObject* dtensor) {
        const auto find = [&]() -> std::shared_ptr<const Way> {
            PyObject* spec = slot(dtensor, dtensor_class().spec_slot);
            for (const auto& way : ways_) {
                if (way->spec.ptr() == spec) {
                    return way;
                }
            }
            return nullptr;
        };
        if (auto found = find()) {
            return found;
        }
        boundary_functions()->intern(dtensor);
        if (auto found = find()) {
            return found;
        }
        const auto answer = owned(PyObject_CallOneArg(ask_.ptr(), dtensor)).cast<py::tuple>();
        auto way = std::make_shared<Way>(Way{answer[0], answer[1], answer[2], answer[3], answer[4], answer[5]});
        if (ways_.size() >= kMaxWays) {
            const auto before = std::exchange(ways_, {});
        }
        ways_.push_back(way);
        return way;
    }

    py::object name_;
    Py_ssize_t position_;
    py::object ask_;
    std::vector<std::shared_ptr<const Way>> ways_;
};

// The entries of a module's inputs, or of its outputs.
class BoundaryEntries {
  public:
    explicit BoundaryEntries(const py::tuple& given) {
        for (const auto& entry : given) {
            entries_.emplace_back(entry.cast<py::tuple>());
        }
    }

    // (args, kwargs), or None: Python places them.
    py::object place_inputs(PyObject* args, PyObject* kwargs, const py::object& converted) {
        auto new_args = py::reinterpret_borrow<py::object>(args), new_kwargs = py::reinterpret_borrow<py::object>(kwargs);
        const auto replace = [&](BoundaryEntry& entry, PyObject* name, Py_ssize_t position) {
            PyObject* value = name != nullptr ? PyDict_GetItem(new_kwargs.ptr(), name) : PyTuple_GET_ITEM(new_args.ptr(), position);
            const auto placed = entry.pass(value, converted);
            if (!placed || placed.ptr() == value) {
                return static_cast<bool>(placed);
            }
            if (name == nullptr) {
                if (new_args.ptr() == args) {
                    new_args = copy_of(args);
                }
                PyObject* before = PyTuple_GET_ITEM(new_args.ptr(), position);
                PyTuple_SET_ITEM(new_args.ptr(), position, Py_NewRef(placed.ptr()));
                Py_DECREF(before);
            } else {
                if (new_kwargs.ptr() == kwargs) {
                    new_kwargs = owned(PyDict_Copy(kwargs));
                }
                if (PyDict_SetItem(new_kwargs.ptr(), name, placed.ptr()) != 0) {
                    throw python_error();
                }
            }
            return true;
        };
        for (auto& entry : entries_) {
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
                if (takes(entry, i) && !replace(entry, nullptr, i)) {
                    return py::none();
                }
            }
            Py_ssize_t at = 0;
            PyObject* name = nullptr;
            while (PyDict_Next(kwargs, &at, &name, nullptr)) {
                if (takes(entry, name) && !replace(entry, name, 0)) {
                    return py::none();
                }
            }
        }
        return py::make_tuple(new_args, new_kwargs);
    }

    // The output, or null: Python places it.
    py::object place_output(PyObject* output) { return entries_.size() == 1 ? entries_[0].convert(output) : py::object(); }

    int traverse(visitproc visit, void* arg) const {
        for (const auto& entry : entries_) {
            if (const int stop = entry.traverse(visit, arg)) {
                return stop;
            }
        }
        return 0;
    }

  private:
    static py::object copy_of(PyObject* tuple) {  // PyTuple_GetSlice gives the tuple itself
        auto made = owned(PyTuple_New(PyTuple_GET_SIZE(tuple)));
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
            PyTuple_SET_ITEM(made.ptr(), i, Py_NewRef(PyTuple_GET_ITEM(tuple, i)));
        }
        return made;
    }

    template <class Where>
    bool takes(const BoundaryEntry& entry, Where where) const {
        if (!entry.is_rest()) {
            return entry.is_for(where);
        }
        for (const auto& other : entries_) {
            if (!other.is_rest() && other.is_for(where)) {
                return false;
            }
        }
        return true;
    }

    std::vector<BoundaryEntry> entries_;
};

}  // namespace vescale
