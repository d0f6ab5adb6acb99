// DTensors in C++: their specs, one object for all that are equal, their local tensors, and new DTensors.

#pragma once

#include "interpreter.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <any>
#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace vescale {

// One DTensorSpec for all that are equal and of one mesh: calls are compared by its address.
struct Spec {
    PyRef object;
    bool is_partial = false;  // on some axis
    bool is_replicate = true;  // on all axes
    bool is_custom = false;  // one is not PyTorch's
    c10::SmallVector<std::int64_t, 5> sizes;
    c10::SmallVector<std::int64_t, 5> strides;
};

using SpecTable = std::unordered_map<PyObject*, std::unique_ptr<Spec>>;

// What everything here shares. Read and written with the interpreter's lock held.
struct State {
    PyTypeObject* dtensor = nullptr;
    Py_ssize_t spec_slot = 0;
    Py_ssize_t local_slot = 0;
    PyRef intern;  // spec -> the interned one, or None
    PyRef decide;  // (op name, overload name, args, kwargs) -> None or (results, replaced arguments)
    PyRef static_arguments;  // (op name, overload name) -> whether each argument decides by its value
    PyRef stock_placements;  // PyTorch's types of placements, a set
    PyRef forget;  // () -> None; clears all tables, here and in Python
    std::size_t max_entries = 0;
    std::size_t num_entries = 0;
    SpecTable specs;
    std::uint64_t epoch = 1;
    PyRef live_copies;  // a set; while it has members, writes take PyTorch's path
    int num_running = 0;  // calls that use entries and specs, which are therefore kept when the tables are cleared
    std::vector<SpecTable> retired_specs;
    std::vector<std::any> retired_tables;
};

// Cleared to compare with Python's path in one process.
inline std::atomic<bool> is_active{true};

inline State& self() {
    static auto* made = new State;  // never destroyed: tensors may die after static objects
    return *made;
}

inline PyObject*& slot(PyObject* object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// What the tables know of an interned spec.
inline const Spec* add_spec(PyObject* interned) {
    auto& specs = self().specs;
    const auto found = specs.find(interned);
    if (found != specs.end()) {
        return found->second.get();
    }
    auto spec = std::make_unique<Spec>();
    spec->object = PyRef::borrow(interned);
    PyRef meta = PyRef::steal(PyObject_GetAttrString(interned, "tensor_meta"));
    PyRef shape = PyRef::steal(meta ? PyObject_GetAttrString(meta.get(), "shape") : nullptr);
    PyRef stride = PyRef::steal(shape ? PyObject_GetAttrString(meta.get(), "stride") : nullptr);
    if (!stride) {
        throw python_error();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.get()); ++i) {
        spec->sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape.get(), i)));
        spec->strides.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(stride.get(), i)));
    }
    PyRef placements = PyRef::steal(PyObject_GetAttrString(interned, "placements"));
    for (Py_ssize_t i = 0; placements && i < PyTuple_GET_SIZE(placements.get()); ++i) {
        PyObject* placement = PyTuple_GET_ITEM(placements.get(), i);
        PyRef is_partial = PyRef::steal(PyObject_CallMethod(placement, "is_partial", nullptr));
        PyRef is_replicate = PyRef::steal(is_partial ? PyObject_CallMethod(placement, "is_replicate", nullptr) : nullptr);
        spec->is_partial |= is_partial.get() == Py_True;
        spec->is_replicate &= is_replicate.get() == Py_True;
        spec->is_custom |= PySet_Contains(self().stock_placements.get(), reinterpret_cast<PyObject*>(Py_TYPE(placement))) != 1;
    }
    if (PyErr_Occurred()) {
        throw python_error();
    }
    return specs.emplace(interned, std::move(spec)).first->second.get();
}

// The interned spec of a DTensor's, which takes the place of an equal one; null: it cannot be interned.
inline const Spec* spec_of(PyObject* dtensor) {
    auto& our = self();
    PyObject*& held = slot(dtensor, our.spec_slot);
    if (held == nullptr) {
        return nullptr;
    }
    const auto found = our.specs.find(held);
    if (found != our.specs.end()) {
        return found->second.get();
    }
    PyRef interned = PyRef::steal(PyObject_CallOneArg(our.intern.get(), held));
    if (!interned) {
        throw python_error();
    }
    if (interned.get() == Py_None) {
        return nullptr;
    }
    const Spec* spec = add_spec(interned.get());
    PyObject*& current = slot(dtensor, our.spec_slot);  // Python ran: look again
    Py_INCREF(interned.get());
    Py_XDECREF(std::exchange(current, interned.get()));
    return spec;
}

// The Python object of an exact DTensor, or null.
inline PyObject* dtensor_of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->key_set().has(c10::DispatchKey::Python)) {
        return nullptr;
    }
    PyObject* object = impl->pyobj_slot()->load_pyobj();
    const bool is_exact = object != nullptr && Py_TYPE(object) == self().dtensor;
    return is_exact && slot(object, self().local_slot) != nullptr ? object : nullptr;
}

inline const at::Tensor& local_of(PyObject* dtensor) {
    return THPVariable_Unpack(slot(dtensor, self().local_slot));
}

inline at::Tensor wrap(at::Tensor local, const Spec& spec) {
    auto keys = c10::DispatchKeySet({local.options().computeDispatchKey()});
    const auto local_keys = local.key_set();
    for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
        if (local_keys.has(key)) {
            keys = keys.add(key);
        }
    }
    // Storages of DTensors have no memory: they tell which ones are views of each other.
    c10::Storage storage(
        c10::Storage::use_byte_size_t{},
        at::detail::computeStorageNbytes(spec.sizes, spec.strides, local.dtype().itemsize()),
        at::DataPtr{nullptr, local.device()},
        c10::GetAllocator(c10::kMeta),
        /*resizable=*/true);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, local.dtype());
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(spec.sizes, spec.strides);
    impl->set_python_dispatch(true);
    PyRef object = PyRef::steal(THPVariable_Wrap(tensor, self().dtensor));
    if (!object) {
        throw python_error();
    }
    slot(object.get(), self().local_slot) = THPVariable_Wrap(std::move(local));
    slot(object.get(), self().spec_slot) = PyRef(spec.object).release();
    return tensor;
}

}  // namespace vescale
