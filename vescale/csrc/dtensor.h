// DTensors in C++: their specs and local tensors, and new DTensors.

#pragma once

#include "interpreter.h"

#include <structmember.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace vescale {

// The class DTensor, and where its objects have their slots. Set with the interpreter's lock held.
struct DTensorClass {
    PyTypeObject* type = nullptr;  // null: not installed
    Py_ssize_t spec_slot = 0;
    Py_ssize_t local_slot = 0;
    py::object live_copies;  // a set; while it has members, writes have to reach what was copied: PyTorch's path sees to it
};

inline DTensorClass& dtensor_class() {
    static auto* made = new DTensorClass;  // never destroyed: tensors may die after static objects
    return *made;
}

inline Py_ssize_t offset_of(py::handle member, py::handle type) {
    TORCH_CHECK_TYPE(Py_TYPE(member.ptr()) == &PyMemberDescr_Type, "expected the descriptor of a slot");
    const auto* descriptor = reinterpret_cast<PyMemberDescrObject*>(member.ptr());
    TORCH_CHECK_TYPE(
        descriptor->d_common.d_type == reinterpret_cast<PyTypeObject*>(type.ptr()) && descriptor->d_member->type == T_OBJECT_EX,
        "expected a slot of the class");
    return descriptor->d_member->offset;
}

inline void set_dtensor_class(py::handle type, py::handle spec, py::handle local) {
    auto& known = dtensor_class();
    TORCH_CHECK_TYPE(
        PyType_Check(type.ptr()) && PyObject_IsSubclass(type.ptr(), THPVariableClass) == 1, "expected a class of tensors");
    known.spec_slot = offset_of(spec, type);
    known.local_slot = offset_of(local, type);
    known.type = reinterpret_cast<PyTypeObject*>(type.ptr());
}

// `live_copies`: the set, or None.
inline void observe_writes(py::object live_copies) {
    TORCH_CHECK_TYPE(live_copies.is_none() || PyAnySet_Check(live_copies.ptr()), "expected a set");
    dtensor_class().live_copies = live_copies.is_none() ? py::object() : std::move(live_copies);
}

inline bool are_writes_observed() {
    const auto& copies = dtensor_class().live_copies;
    return copies && PySet_GET_SIZE(copies.ptr()) > 0;
}

inline PyObject*& slot(PyObject* object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// Whether a DTensor has a local tensor. Nodes ask without the interpreter's lock, which `isinstance` would need.
inline bool has_local(PyObject* dtensor) {
    PyObject* local = slot(dtensor, dtensor_class().local_slot);
    return local != nullptr && PyType_IsSubtype(Py_TYPE(local), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// The Python object of an exact DTensor, or null.
inline PyObject* dtensor_of(const at::Tensor& tensor) {
    const auto& known = dtensor_class();
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->key_set().has(c10::DispatchKey::Python)) {
        return nullptr;
    }
    PyObject* object = impl->pyobj_slot()->load_pyobj();
    const bool is_exact = object != nullptr && Py_TYPE(object) == known.type;
    return is_exact && has_local(object) ? object : nullptr;
}

inline const at::Tensor& local_of(PyObject* dtensor) {
    return THPVariable_Unpack(slot(dtensor, dtensor_class().local_slot));
}

at::Tensor wrap(at::Tensor local, py::handle spec, c10::IntArrayRef sizes, c10::IntArrayRef strides);

// A DTensor that C++ has made. Autograd saves results of ops (of softmax, of rsqrt) by a detached copy, for which PyTorch runs
// Python; this one makes it in C++.
class DTensorImpl final : public c10::TensorImpl {
  public:
    using c10::TensorImpl::TensorImpl;

    c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
        const c10::VariableVersion& version, bool allow_tensor_metadata_change) const override {
        return detached(c10::VariableVersion(version), allow_tensor_metadata_change);
    }

    c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
        c10::VariableVersion&& version, bool allow_tensor_metadata_change) const override {
        return detached(std::move(version), allow_tensor_metadata_change);
    }

  private:
    c10::intrusive_ptr<c10::TensorImpl> detached(c10::VariableVersion&& version, bool allow_tensor_metadata_change) const {
        const bool is_usual = dtensor_class().type != nullptr && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
            !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
        if (is_usual) {
            Gil gil;
            PyObject* object = pyobj_slot()->load_pyobj();
            const auto& known = dtensor_class();
            if (object != nullptr && Py_TYPE(object) == known.type && has_local(object)) {
                const at::Tensor& local = local_of(object);
                at::Tensor copy(local.unsafeGetTensorImpl()->shallow_copy_and_detach(
                    torch::autograd::impl::version_counter(local), /*allow_tensor_metadata_change=*/false));
                const at::Tensor made = wrap(std::move(copy), slot(object, known.spec_slot), sizes(), strides());
                auto* impl = made.unsafeGetTensorImpl();
                impl->set_storage_keep_dtype(storage());
                if (!impl->is_inference()) {
                    impl->set_version_counter(std::move(version));
                    impl->set_allow_tensor_metadata_change(allow_tensor_metadata_change);
                }
                return made.getIntrusivePtr();
            }
        }
        return TensorImpl::shallow_copy_and_detach(std::move(version), allow_tensor_metadata_change);
    }
};

// A new DTensor of global sizes and strides.
inline at::Tensor wrap(at::Tensor local, py::handle spec, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
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
        at::detail::computeStorageNbytes(sizes, strides, local.dtype().itemsize()),
        at::DataPtr{nullptr, local.device()},
        c10::GetAllocator(c10::kMeta),
        /*resizable=*/true);
    auto tensor = at::detail::make_tensor<DTensorImpl>(std::move(storage), keys, local.dtype());
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(sizes, strides);
    impl->set_python_dispatch(true);
    const auto& known = dtensor_class();
    const auto object = owned(THPVariable_Wrap(tensor, known.type));
    slot(object.ptr(), known.local_slot) = THPVariable_Wrap(std::move(local));
    slot(object.ptr(), known.spec_slot) = spec.inc_ref().ptr();
    return tensor;
}

}  // namespace vescale
