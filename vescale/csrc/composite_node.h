// The autograd node of a composite.

#pragma once

#include "kept_results.h"
#include "leaf_gradients.h"

#include <array>

namespace vescale {

using Wanted = std::array<bool, 3>;

// Runs a composite's backward, on local tensors where that is known to be the same. Its outputs are the gradients of the
// forward's operands.
class CompositeBackward : public torch::autograd::Node {
  public:
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        if (!gradients[0].defined()) {
            return torch::autograd::variable_list(num_outputs());
        }
        std::vector<at::Tensor> operands{std::move(gradients[0])}, kept;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto& saved : saved_) {
                operands.push_back(saved.unpack());
            }
            kept = kept_.unpack();
        }
        Wanted wanted{};
        Key words = words_;
        for (const auto i : c10::irange(num_outputs())) {
            wanted[i] = task_should_compute_output(i);
            words.push_back(wanted[i]);
        }
        if (at::GradMode::is_enabled()) {  // for second derivatives
            return differentiate(operands, kept_.beside(operands[0], kept), wanted);
        }
        const auto run_with = [&](c10::ArrayRef<at::Tensor> given) {
            return run(given, kept_.beside(given[0], kept), wanted);
        };
        if (!is_composable(operands)) {
            return run_with(operands);
        }
        auto found = parts().run(operands, words, run_with);
        give_to_leaves(*this, found);
        return found;
    }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto& saved : saved_) {
            saved.reset_data();
        }
        kept_.release();
    }

    // An operand of the forward that the backward reads; undefined where it does not.
    void save(const at::Tensor& operand) {
        saved_.push_back(
            operand.defined() ? torch::autograd::SavedVariable(operand, /*is_output=*/false) : torch::autograd::SavedVariable());
    }

    // The results of the forward, all but the first of which are kept, with the specs of these.
    void keep(const std::vector<at::Tensor>& results, std::vector<py::object> specs) {
        kept_.save(results, std::move(specs));
    }

    // All that is held until the backward, but for what hooks have packed.
    std::vector<at::Tensor> held() {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<at::Tensor> found;
        for (const auto& saved : saved_) {
            add_held(saved, found);
        }
        kept_.add_held(found);
        return found;
    }

  protected:
    // `words` distinguish backwards of equal operands.
    explicit CompositeBackward(Key words = {}) : words_(std::move(words)) {}

    virtual Parts& parts() const = 0;

    // The wanted gradients. The operands are the output's gradient and what has been saved.
    virtual torch::autograd::variable_list run(
        c10::ArrayRef<at::Tensor> operands, const std::vector<at::Tensor>& kept, const Wanted& wanted) const = 0;

    // The same, as a differentiable function of all operands.
    virtual torch::autograd::variable_list differentiate(
        c10::ArrayRef<at::Tensor> operands, const std::vector<at::Tensor>& kept, const Wanted& wanted) const {
        return run(operands, kept, wanted);
    }

  private:
    std::vector<torch::autograd::SavedVariable> saved_;
    KeptResults kept_;
    Key words_;
};

// The results of a composite's forward, outside of autograd.
template <class Function>
std::vector<at::Tensor> run_forward(
    Parts& parts, c10::ArrayRef<at::Tensor> operands, c10::ArrayRef<std::uint64_t> words, const Function& function,
    std::vector<py::object>* kept = nullptr) {
    const at::NoGradGuard guard;
    return parts.run(operands, words, function, kept);
}

}  // namespace vescale
