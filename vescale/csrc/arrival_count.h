// Counts the gradients of a bucket as they arrive, and copies them to it. Python is called for the last missing one, and for
// unusual cases only.

#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include "tensor_memory.h"
#include "zero_signs.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

// Of Python's stable interface, the little that is needed: its headers are not installed everywhere.
struct _object;
using PyObject = _object;
extern "C" std::ptrdiff_t PyDict_Size(PyObject*);

namespace vescale {

// Written by hooks, on the threads of the engine, and by Python. Gradients are copied with the interpreter's lock held.
class ArrivalCount {
  public:
    ArrivalCount(std::size_t num, const std::int32_t* expected)
        : expected_(expected, expected + num), left_(num), is_placed_(num), is_announced_(num) {
        reset(0);
    }

    void reset(std::int32_t missing) {
        stop();
        forget_placed();
        for (std::size_t i = 0; i < left_.size(); ++i) {
            left_[i].store(expected_[i]);
        }
        missing_.store(missing);
    }

    bool has(std::size_t index) const { return index < left_.size(); }

    // One that arrives more often than expected does not stand for another.
    void add(std::size_t index) {
        if (has(index) && left_[index].load() > 0) {
            left_[index].fetch_sub(1);
            missing_.fetch_sub(1);
        }
    }

    // Counts one that is expected, unless it is the last that is missing. Returns false where Python has to count.
    bool add_early(std::size_t index) {
        if (!is_counting.load() || left_[index].load() <= 0) {
            return false;
        }
        for (auto missing = missing_.load(); missing > 1;) {
            if (missing_.compare_exchange_weak(missing, missing - 1)) {
                left_[index].fetch_sub(1);
                return true;
            }
        }
        return false;
    }

    std::int32_t missing() const { return missing_.load(); }

    // Until `stop`. `targets`, `specs`: by slot, where a gradient may be copied to, a tensor, and the spec that it has to have
    // there, a Python object; null: it stays with its parameter. The caller keeps both arrays, and what is in them.
    void start(void* const* targets, void* const* specs) {
        targets_ = targets;
        specs_ = specs;
        is_counting.store(true);
    }

    void stop() {
        is_counting.store(false);
        targets_ = specs_ = nullptr;
    }

    // Copies the local tensor of a gradient to its target, and counts it, unless it is the last that is missing.
    bool place(std::size_t index, const void* spec, const at::Tensor& gradient) {
        if (targets_ == nullptr || targets_[index] == nullptr || specs_[index] != spec) {
            return false;
        }
        const at::Tensor target(
            c10::intrusive_ptr<at::TensorImpl>::unsafe_reclaim_from_nonowning(static_cast<at::TensorImpl*>(targets_[index])));
        const bool is_alike = gradient.key_set() == target.key_set() && gradient.dtype() == target.dtype() &&
            gradient.sizes() == target.sizes() && gradient.is_contiguous() && has_memory(gradient) && has_memory(target) && target.is_cpu() && has_zero_signs(target.scalar_type());
        if (!is_alike || gradient.is_alias_of(target) || !add_early(index)) {
            return false;
        }
        std::memcpy(target.mutable_data_ptr(), gradient.const_data_ptr(), gradient.nbytes());
        zero_sign(target);
        is_placed_[index] = is_announced_[index] = 1;
        return true;
    }

    // By slot, whether its gradient is in its target.
    std::vector<std::uint8_t>& placed() { return is_placed_; }

    void forget_placed() {
        std::fill(is_placed_.begin(), is_placed_.end(), 0);
        std::fill(is_announced_.begin(), is_announced_.end(), 0);
    }

    // Whether the hook that the engine calls now is of a gradient that has been copied, and counted.
    bool was_announced(std::size_t index) { return std::exchange(is_announced_[index], 0) != 0; }

    std::atomic<bool> is_counting{false};

  private:
    const std::vector<std::int32_t> expected_;
    std::vector<std::atomic<std::int32_t>> left_;  // a slot's gradients arrive one after the other
    std::vector<std::uint8_t> is_placed_, is_announced_;
    void* const* targets_ = nullptr;
    void* const* specs_ = nullptr;
    std::atomic<std::int32_t> missing_{0};
};

using SharedCount = std::shared_ptr<ArrivalCount>;

// All Python hooks that a tensor has for accumulated gradients, as the one object that torch keeps for them. Python is not
// entered for a gradient that is counted early, but only if the owner of the count has the only hook.
class CountingHooks : public torch::autograd::PostAccumulateGradHook {
  public:
    CountingHooks(std::unique_ptr<PostAccumulateGradHook> hooks, PyObject* dict, SharedCount count, std::size_t index)
        : hooks(std::move(hooks)), dict_(dict), count_(std::move(count)), index_(index) {}

    void operator()(const at::Tensor& tensor) override {
        if (count_->was_announced(index_)) {
            return;
        }
        // A graph of the gradient (create_graph=True) is Python's to cut off.
        if (!is_alone() || at::GradMode::is_enabled() || !count_->add_early(index_)) {
            (*hooks)(tensor);
        }
    }

    bool place(const void* spec, const at::Tensor& gradient) const { return count_->place(index_, spec, gradient); }

    // The size is one word, which may be read without the interpreter's lock. `hooks` keeps the dict alive.
    bool is_alone() const { return PyDict_Size(dict_) == 1; }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override { hooks->compiled_args(args); }

    void apply_with_saved(at::Tensor& tensor, torch::dynamo::autograd::SwapSavedVariables& saved) override {
        hooks->apply_with_saved(tensor, saved);
    }

    std::unique_ptr<PostAccumulateGradHook> hooks;

  private:
    PyObject* dict_;
    SharedCount count_;
    std::size_t index_;
};

}  // namespace vescale
