// What kernels at the Python dispatch key have in common: keys of calls, and PyTorch's own path.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace vescale {

// Local tensors with more elements in all than this are worked on without the interpreter's lock.
constexpr std::int64_t kLargeCall = 1 << 14;

// What to add to the number of elements for a local tensor: work on a device may wait for it, and for other ranks, however
// little it is.
inline std::int64_t elements_of(const at::Tensor& local) {
    return local.is_cpu() ? local.numel() : kLargeCall + 1;
}

// Keys above Python's: what runs below must not enter autograd, autocast or functorch again.
inline const c10::DispatchKeySet kAbovePython = c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python));

// The op by PyTorch's path.
inline void run_stock(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
    (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
}

// What distinguishes calls of one op: specs by address, other arguments by type and, where they decide, by value.
using Key = c10::SmallVector<std::uint64_t, 24>;

struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
        std::uint64_t hash = 0x9e3779b97f4a7c15ULL ^ key.size();
        for (const auto word : key) {
            hash = (hash ^ word) * 0xff51afd7ed558ccdULL;
            hash ^= hash >> 32;
        }
        return hash;
    }
};

// Kernels that are installed: the objects, which PyTorch's table owns, and what takes them out of it.
template <class Kernel>
struct Registration {
    std::vector<Kernel*> kernels;
    std::vector<c10::RegistrationHandleRAII> handles;

    void add(const c10::OperatorName& op, c10::DispatchKey key, std::unique_ptr<Kernel> kernel) {
        kernels.push_back(kernel.get());
        handles.push_back(c10::Dispatcher::singleton().registerImpl(
            op, key, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)), std::nullopt, nullptr, "vescale"));
    }

    void remove_all() {
        kernels.clear();
        handles.clear();
    }
};

}  // namespace vescale
