// Interned specs: of equal DTensorSpecs of one mesh, one object stands for all, so that calls are compared by addresses.

#pragma once

#include "dtensor.h"

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <any>
#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace vescale {

struct Spec {
    py::object object;
    bool is_partial = false;  // on some axis
    bool is_replicate = true;  // on all axes
    bool is_custom = false;  // one of the placements is not PyTorch's
    c10::SmallVector<std::int64_t, 5> sizes;
    c10::SmallVector<std::int64_t, 5> strides;
};

using SpecTable = ska::flat_hash_map<PyObject*, std::unique_ptr<Spec>>;

// What Python is asked, and the tables. Read and written with the interpreter's lock held.
struct State {
    py::object intern;  // spec -> the interned one, or None
    py::object decide;  // (op name, overload name, args, kwargs) -> None or (results, replaced arguments, parts)
    py::object static_arguments;  // (op name, overload name) -> whether each argument decides by its value
    py::object stock_placements;  // PyTorch's types of placements, a set
    py::object forget;  // () -> None; clears all tables, here and in Python
    std::size_t max_entries = 0;
    std::size_t num_entries = 0;
    SpecTable specs;
    std::uint64_t epoch = 1;  // grows when the tables are cleared
    int num_running = 0;
    std::vector<std::any> retired;  // tables that were cleared while calls were using them
};

inline State& self() {
    static auto* made = new State;  // never destroyed, as DTensorClass
    return *made;
}

// Cleared to compare with Python's path in one process.
inline std::atomic<bool> is_active{true};

// While one exists, specs and entries stay in memory, also when another thread clears the tables. The lock is held when it
// is made and destroyed, but not necessarily in between.
class Running {
  public:
    Running() { self().num_running += 1; }
    ~Running() {
        auto& our = self();
        our.num_running -= 1;
        if (our.num_running == 0 && !our.retired.empty()) {
            const auto retired = std::exchange(our.retired, {});
        }
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
};

// Takes a table out of use.
template <class Table>
void retire(Table& table) {
    self().retired.emplace_back(std::make_shared<Table>(std::exchange(table, {})));
}

// What the tables know of an interned spec.
inline const Spec* add_spec(PyObject* interned) {
    auto& specs = self().specs;
    const auto found = specs.find(interned);
    if (found != specs.end()) {
        return found->second.get();
    }
    auto spec = std::make_unique<Spec>();
    spec->object = py::reinterpret_borrow<py::object>(interned);
    const auto meta = owned(PyObject_GetAttrString(interned, "tensor_meta"));
    const py::tuple shape(owned(PyObject_GetAttrString(meta.ptr(), "shape")));
    const py::tuple stride(owned(PyObject_GetAttrString(meta.ptr(), "stride")));
    for (const auto size : shape) {
        spec->sizes.push_back(size.cast<std::int64_t>());
    }
    for (const auto distance : stride) {
        spec->strides.push_back(distance.cast<std::int64_t>());
    }
    TORCH_CHECK_VALUE(spec->sizes.size() == spec->strides.size(), "a spec with other strides than sizes");
    const py::tuple placements(owned(PyObject_GetAttrString(interned, "placements")));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(placements.ptr()); ++i) {
        PyObject* placement = PyTuple_GET_ITEM(placements.ptr(), i);
        spec->is_partial |= owned(PyObject_CallMethod(placement, "is_partial", nullptr)).ptr() == Py_True;
        spec->is_replicate &= owned(PyObject_CallMethod(placement, "is_replicate", nullptr)).ptr() == Py_True;
        auto* type = reinterpret_cast<PyObject*>(Py_TYPE(placement));
        spec->is_custom |= PySet_Contains(self().stock_placements.ptr(), type) != 1;
    }
    if (PyErr_Occurred()) {
        throw python_error();
    }
    return specs.emplace(interned, std::move(spec)).first->second.get();
}

// The interned spec of a DTensor's, which takes the place of an equal one; null: it cannot be interned.
inline const Spec* spec_of(PyObject* dtensor) {
    const auto offset = dtensor_class().spec_slot;
    PyObject* held = slot(dtensor, offset);
    if (held == nullptr) {
        return nullptr;
    }
    const auto found = self().specs.find(held);
    if (found != self().specs.end()) {
        return found->second.get();
    }
    auto interned = owned(PyObject_CallOneArg(self().intern.ptr(), held));
    if (interned.is_none()) {
        return nullptr;
    }
    const Spec* spec = add_spec(interned.ptr());
    PyObject*& current = slot(dtensor, offset);
    const auto before = py::reinterpret_steal<py::object>(std::exchange(current, interned.release().ptr()));
    return spec;
}

inline at::Tensor wrap(at::Tensor local, const Spec& spec) {
    return wrap(std::move(local), spec.object, spec.sizes, spec.strides);
}

}  // namespace vescale
