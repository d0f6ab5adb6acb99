// Tensor hooks behind a gate: while it is shut, the engine passes them by without entering Python.
//
// A hook that has something to do once in a backward, but that any tensor may be the first to call, costs a call into
// Python for every tensor, most of which is making the gradient a Python object. Here a flag is looked at before that.
//
// It needs torch's headers, so that the library is for one version of torch, which its file name contains.

#include "arrival_count.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

constexpr std::int64_t OPEN = -1;
constexpr std::int64_t SHUT = -2;

struct Gate {
    // OPEN, SHUT, or the number of the backward for which the gate is shut: that of another thread is not let pass.
    std::atomic<std::int64_t> state{OPEN};

    bool is_shut() const {
        const auto now = state.load(std::memory_order_relaxed);
        return now == SHUT || (now != OPEN && now == torch::autograd::get_current_graph_task_id());
    }
};

using SharedGate = std::shared_ptr<Gate>;
static_assert(sizeof(Gate::state) == 8);

// Whether gradients are accumulated in all leaves of the running backward. torch.autograd.grad returns them instead, and
// hooks may change what it returns.
bool accumulates_everything() {
    const auto* execution = torch::autograd::get_current_graph_task_exec_info();
    return execution != nullptr && execution->empty();
}

// All Python hooks of a tensor, as the one object that torch keeps for them. They are skipped while the gate is shut, but
// only if the gate's owner has the only hook (hooks that others register are always called), and only in a backward that
// accumulates all gradients.
class GatedHooks : public FunctionPreHook {
  public:
    GatedHooks(std::unique_ptr<FunctionPreHook> hooks, PyObject* dict, SharedGate gate)
        : hooks(std::move(hooks)), dict_(dict), gate_(std::move(gate)) {}

    variable_list operator()(const variable_list& gradients) override {
        return lets_pass() ? gradients : (*hooks)(gradients);
    }

    bool lets_pass() const {
        // The size is one word, which may be read without the interpreter's lock. `hooks` keeps the dict alive.
        return gate_->is_shut() && PyDict_Size(dict_) == 1 && accumulates_everything();
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
        hooks->compiled_args(args);
    }

    std::unique_ptr<FunctionPreHook> hooks;

  private:
    PyObject* dict_;
    SharedGate gate_;
};

at::Tensor held(void* tensor) {
    auto* impl = static_cast<at::TensorImpl*>(tensor);
    return at::Tensor(c10::intrusive_ptr<at::TensorImpl>::unsafe_reclaim_from_nonowning(impl));
}

std::vector<std::unique_ptr<FunctionPreHook>>& hooks_of(void* tensor) {
    return torch::autograd::impl::hooks(held(tensor));
}

}  // namespace

EXPORT void* new_gate() {
    return new SharedGate(std::make_shared<Gate>());
}

// The tensors behind the gate keep it: open for ever.
EXPORT void free_gate(void* gate) {
    if (gate == nullptr) {
        return;
    }
    std::unique_ptr<SharedGate> owned(static_cast<SharedGate*>(gate));
    (*owned)->state.store(OPEN);
}

// 64 bits, for the owner to write. In no order with other memory.
EXPORT void* state_of(void* gate) {
    return gate == nullptr ? nullptr : &(*static_cast<SharedGate*>(gate))->state;
}

// Puts the Python hooks of a tensor, those in `dict`, behind a gate. Returns 0, and changes nothing, unless they are all of
// the tensor's hooks.
EXPORT int guard(void* gate, void* tensor, PyObject* dict) {
    if (gate == nullptr || tensor == nullptr || dict == nullptr) {
        return 0;
    }
    auto& hooks = hooks_of(tensor);
    if (hooks.size() != 1 || dynamic_cast<GatedHooks*>(hooks[0].get()) != nullptr) {
        return 0;
    }
    hooks[0] = std::make_unique<GatedHooks>(std::move(hooks[0]), dict, *static_cast<SharedGate*>(gate));
    return 1;
}

// Inside of a backward: whether a hook, a FunctionPreHook, is behind a gate, and would not be called now.
EXPORT int lets_pass(void* hook) {
    const auto* gated = dynamic_cast<GatedHooks*>(static_cast<FunctionPreHook*>(hook));
    return gated != nullptr && gated->lets_pass();
}

// The reverse of `guard`.
EXPORT void unguard(void* tensor) {
    if (tensor == nullptr) {
        return;
    }
    for (auto& hook : hooks_of(tensor)) {
        if (auto* gated = dynamic_cast<GatedHooks*>(hook.get())) {
            auto bare = std::move(gated->hooks);
            hook = std::move(bare);
        }
    }
}

// Counts of gradients that arrive; see arrival_count.h.

EXPORT void* new_count(std::size_t num, const std::int32_t* expected) {
    return expected == nullptr && num != 0
        ? nullptr
        : new vescale::SharedCount(std::make_shared<vescale::ArrivalCount>(num, expected));
}

// The tensors whose gradients it counts keep it.
EXPORT void free_count(void* count) {
    if (count == nullptr) {
        return;
    }
    std::unique_ptr<vescale::SharedCount> owned(static_cast<vescale::SharedCount*>(count));
    (*owned)->stop();
}

EXPORT void reset_count(void* count, std::int32_t missing) {
    if (count != nullptr) {
        (*static_cast<vescale::SharedCount*>(count))->reset(missing);
    }
}

EXPORT void start_counting(void* count, void* const* targets, void* const* specs) {
    if (count != nullptr) {
        (*static_cast<vescale::SharedCount*>(count))->start(targets, specs);
    }
}

EXPORT void stop_counting(void* count) {
    if (count != nullptr) {
        (*static_cast<vescale::SharedCount*>(count))->stop();
    }
}

// A byte for each slot.
EXPORT void* placed_of(void* count) {
    return count == nullptr ? nullptr : (*static_cast<vescale::SharedCount*>(count))->placed().data();
}

EXPORT void forget_placed(void* count) {
    if (count != nullptr) {
        (*static_cast<vescale::SharedCount*>(count))->forget_placed();
    }
}

EXPORT void add_arrival(void* count, std::size_t index) {
    if (count != nullptr) {
        (*static_cast<vescale::SharedCount*>(count))->add(index);
    }
}

EXPORT std::int32_t num_missing(void* count) {
    return count == nullptr ? 0 : (*static_cast<vescale::SharedCount*>(count))->missing();
}

// Counts the gradients of a tensor, whose Python hooks for accumulated gradients are in `dict`, as slot `index`, and as no
// other from now on.
EXPORT void count_gradients(void* count, std::size_t index, void* tensor, PyObject* dict) {
    if (tensor == nullptr) {
        return;
    }
    auto& hooks = torch::autograd::impl::post_acc_grad_hooks(held(tensor));
    if (auto* counting = dynamic_cast<vescale::CountingHooks*>(hooks.get())) {
        auto bare = std::move(counting->hooks);
        hooks = std::move(bare);
    }
    if (hooks != nullptr && count != nullptr && (*static_cast<vescale::SharedCount*>(count))->has(index)) {
        const auto& shared = *static_cast<vescale::SharedCount*>(count);
        hooks = std::make_unique<vescale::CountingHooks>(std::move(hooks), dict, shared, index);
    }
}

// Whether a hook, a PostAccumulateGradHook, counts gradients, and is the only one.
EXPORT int is_only_count(void* hook) {
    const auto* counting = dynamic_cast<vescale::CountingHooks*>(static_cast<torch::autograd::PostAccumulateGradHook*>(hook));
    return counting != nullptr && counting->is_alone();
}

// Copies the local tensor of a gradient, which has this spec, to the bucket for which such a hook counts. Returns 0, and
// does nothing, where the gradient has to become the parameter's.
EXPORT int place_gradient(void* hook, void* spec, void* gradient) {
    const auto* counting = dynamic_cast<vescale::CountingHooks*>(static_cast<torch::autograd::PostAccumulateGradHook*>(hook));
    return counting != nullptr && counting->place(spec, *static_cast<const at::Tensor*>(gradient));
}
