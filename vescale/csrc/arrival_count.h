// Counts the gradients of a bucket as they arrive. Python is called for the last missing one, and for unusual cases only.

#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <ATen/core/grad_mode.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Of Python's stable interface, the little that is needed: its headers are not installed everywhere.
struct _object;
using PyObject = _object;
extern "C" std::ptrdiff_t PyDict_Size(PyObject*);

namespace vescale {

// Written by hooks, on the threads of the engine, and by Python.
class ArrivalCount {
  public:
    ArrivalCount(std::size_t num, const std::int32_t* expected) : expected_(expected, expected + num), left_(num) {
        reset(0);
    }

    void reset(std::int32_t missing) {
        is_counting.store(false);
        for (std::size_t i = 0; i < left_.size(); ++i) {
            left_[i].store(expected_[i]);
        }
        missing_.store(missing);
    }

    // One that arrives more often than expected does not stand for another.
    void add(std::size_t index) {
        if (left_[index].load() > 0) {
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

    std::atomic<bool> is_counting{false};

  private:
    const std::vector<std::int32_t> expected_;
    std::vector<std::atomic<std::int32_t>> left_;  // a slot's gradients arrive one after the other
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
        // A graph of the gradient (create_graph=True) is Python's to cut off.
        if (!is_alone() || at::GradMode::is_enabled() || !count_->add_early(index_)) {
            (*hooks)(tensor);
        }
    }

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
