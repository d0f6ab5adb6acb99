// The gradients of many parameters, taken from them or given to them in one call, none of them made a Python object; and
// what is raised where memory is used that has been freed under its tensors.
//
// Tensors and storages come as addresses, which the caller keeps alive. Each function does all or nothing.
//
// It needs torch's headers, so that the library is for one version of torch, which its file name contains.

#include "tensor_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// A tensor that somebody else holds.
class Borrowed {
  public:
    explicit Borrowed(void* impl)
        : tensor_(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim(static_cast<at::TensorImpl*>(impl))) {}
    ~Borrowed() {
        tensor_.unsafeReleaseTensorImpl();
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;

    const at::Tensor& operator*() const {
        return tensor_;
    }
    const at::Tensor* operator->() const {
        return &tensor_;
    }

  private:
    at::Tensor tensor_;
};

// Whether the bytes of `source` are what `target` is to hold. The keys say that it is an ordinary tensor on the CPU as the
// target is: not sparse, no subclass with its own dispatch, not conjugated, negated or zero without having memory.
bool are_alike(const at::Tensor& source, const at::Tensor& target) {
    return source.defined() && source.key_set() == target.key_set() && source.dtype() == target.dtype() &&
        source.sizes() == target.sizes() && source.is_contiguous() && target.is_contiguous() && target.is_cpu() &&
        vescale::has_memory(source) && vescale::has_memory(target);
}

// Whether writing to a target may change the source before it is read: other memory of the same block.
bool may_be_overwritten(const at::Tensor& source, const at::Tensor& target) {
    return source.const_data_ptr() != target.const_data_ptr() && source.is_alias_of(target);
}

bool has_null(std::size_t num, void* const* addresses) {
    return num != 0 && (addresses == nullptr || std::find(addresses, addresses + num, nullptr) != addresses + num);
}

// The gradients that are going to be copied are the inputs of this event in a profile.
void tell_profiler(at::RecordFunction& event, std::size_t num, void* const* parameters, void* const* targets) {
    std::vector<c10::IValue> copied;
    for (std::size_t i = 0; event.needsInputs() && i < num; ++i) {
        const at::Tensor& grad = Borrowed(parameters[i])->grad();
        if (grad.const_data_ptr() != Borrowed(targets[i])->const_data_ptr()) {
            copied.emplace_back(grad);
        }
    }
    event.before("vescale::take_grads", c10::ArrayRef<const c10::IValue>(copied.data(), copied.size()));
}

}  // namespace

// Moves `grad` of each parameter to its target. Returns 0, and changes nothing, unless each is there, like its target, and in
// its place already or in other memory than all of them, which are in one block.
EXPORT int take_grads(std::size_t num, void* const* parameters, void* const* targets) {
    if (has_null(num, parameters) || has_null(num, targets)) {
        return 0;
    }
    for (std::size_t i = 0; i < num; ++i) {
        const at::Tensor& grad = Borrowed(parameters[i])->grad();
        Borrowed target(targets[i]);
        if (!are_alike(grad, *target) || may_be_overwritten(grad, *target)) {
            return 0;
        }
    }
    at::RecordFunction profiled(at::RecordScope::FUNCTION);
    if (profiled.isActive()) {
        tell_profiler(profiled, num, parameters, targets);
    }
    for (std::size_t i = 0; i < num; ++i) {
        Borrowed parameter(parameters[i]);
        at::Tensor& grad = parameter->mutable_grad();
        void* place = Borrowed(targets[i])->mutable_data_ptr();
        if (place != grad.const_data_ptr()) {
            std::memcpy(place, grad.const_data_ptr(), grad.nbytes());
        }
        grad.reset();
    }
    return 1;
}

// The first parameter whose node of graphs, where its gradient arrives, has hooks that run after that, or, if `before` is not 0,
// also such that run before it. -1: none has.
EXPORT int first_hooked(std::size_t num, void* const* parameters, int before) {
    if (has_null(num, parameters)) {
        return -1;
    }
    for (std::size_t i = 0; i < num; ++i) {
        const auto node = torch::autograd::impl::try_get_grad_accumulator(*Borrowed(parameters[i]));
        if (node != nullptr && (!node->post_hooks().empty() || (before != 0 && !node->pre_hooks().empty()))) {
            return static_cast<int>(i);
        }
    }
    return -1;
}

// Makes each gradient its parameter's. Returns 0, and changes nothing, if one has a gradient.
EXPORT int give_grads(std::size_t num, void* const* parameters, void* const* gradients) {
    if (has_null(num, parameters) || has_null(num, gradients)) {
        return 0;
    }
    for (std::size_t i = 0; i < num; ++i) {
        if (Borrowed(parameters[i])->grad().defined()) {
            return 0;
        }
    }
    for (std::size_t i = 0; i < num; ++i) {
        Borrowed(parameters[i])->mutable_grad() = *Borrowed(gradients[i]);
    }
    return 1;
}

// Reads and writes of the storage raise a RuntimeError of `message` from now on; nullptr: they work again. Returns 0, and
// changes nothing, where torch cannot take an error back.
EXPORT int set_access_error(c10::StorageImpl* storage, const char* message) {
    if (storage == nullptr) {
        return 0;
    }
    return [message](auto& found) {
        if constexpr (requires { found.clear_data_ptr_access_error_msg_(); }) {
            if (message) {
                found.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
            } else {
                found.clear_data_ptr_access_error_msg_();
            }
            return 1;
        }
        return 0;
    }(*storage);
}
