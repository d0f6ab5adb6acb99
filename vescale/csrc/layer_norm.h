// `aten::layer_norm` on DTensors. Its mean and deviation, which only the backward reads, are not made to DTensors.

#pragma once

#include "kept_results.h"

#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>

namespace vescale {

inline Parts& layer_norm_forward() {
    static auto* made = new Parts("layer_norm");
    return *made;
}

inline Parts& layer_norm_backward() {
    static auto* made = new Parts("layer_norm_backward");
    return *made;
}

class LayerNormBackward final : public torch::autograd::Node {
  public:
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        if (!gradients[0].defined()) {
            return torch::autograd::variable_list(3);
        }
        std::array<at::Tensor, 4> operands;
        std::vector<at::Tensor> statistics;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            operands = {std::move(gradients[0]), input_.unpack(), weight_.unpack(), bias_.unpack()};
            statistics = kept_.unpack();
        }
        std::array<bool, 3> wanted{};
        std::vector<std::uint64_t> words(shape_.begin(), shape_.end());
        for (const auto i : c10::irange(3)) {
            wanted[i] = task_should_compute_output(i);
            words.push_back(wanted[i]);
        }
        const auto run = [&](c10::ArrayRef<at::Tensor> given) -> std::vector<at::Tensor> {
            const auto beside = kept_.beside(given[0], statistics);
            auto found = at::native_layer_norm_backward(
                given[0], given[1], shape_, beside[0], beside[1], given[2], given[3], wanted);
            return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
        };
        const bool is_recorded = at::GradMode::is_enabled();  // for second derivatives
        if (is_recorded || !is_composable({&operands[0], &operands[1], &operands[2], &operands[3]})) {
            return run(operands);
        }
        return layer_norm_backward().run(operands, words, run);
    }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        input_.reset_data();
        weight_.reset_data();
        bias_.reset_data();
        kept_.release();
    }

    std::string name() const override { return "LayerNormBackward"; }

    torch::autograd::SavedVariable input_, weight_, bias_;
    KeptResults kept_;
    std::vector<std::int64_t> shape_;
};

inline at::Tensor layer_norm(
    c10::DispatchKeySet keys, const at::Tensor& input, c10::SymIntArrayRef shape, const std::optional<at::Tensor>& given_weight,
    const std::optional<at::Tensor>& given_bias, double eps, bool cudnn_enable) {
    const at::Tensor weight = given_weight.value_or(at::Tensor()), bias = given_bias.value_or(at::Tensor());
    const auto sizes = c10::asIntArrayRefSlowOpt(shape);
    if (!sizes || !is_composable({&input, &weight, &bias})) {
        const at::impl::MaybeSetTLSOnEntryGuard guard;
        return at::_ops::layer_norm::redispatch(below(keys), input, shape, given_weight, given_bias, eps, cudnn_enable);
    }
    const bool is_differentiable = torch::autograd::compute_requires_grad(input, weight, bias);
    const std::array<at::Tensor, 3> operands{input, weight, bias};
    std::vector<at::Tensor> results;
    std::vector<py::object> specs;
    {
        const at::NoGradGuard guard;
        const std::vector<std::uint64_t> words(sizes->begin(), sizes->end());
        const auto run = [&](c10::ArrayRef<at::Tensor> given) -> std::vector<at::Tensor> {
            auto found = at::native_layer_norm(given[0], *sizes, given[1], given[2], eps);
            return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
        };
        results = layer_norm_forward().run(operands, words, run, &specs);
    }
    at::Tensor output = std::move(results[0]);
    results.erase(results.begin());
    if (is_differentiable) {
        auto node = c10::make_intrusive<LayerNormBackward>();
        node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
        node->input_ = torch::autograd::SavedVariable(input, /*is_output=*/false);
        if (weight.defined()) {
            node->weight_ = torch::autograd::SavedVariable(weight, /*is_output=*/false);
        }
        if (bias.defined()) {
            node->bias_ = torch::autograd::SavedVariable(bias, /*is_output=*/false);
        }
        node->kept_.save(std::move(results), std::move(specs));
        node->shape_ = sizes->vec();
        torch::autograd::set_history(output, node);
    } else if (!specs.empty()) {
        Gil gil;
        specs.clear();
    }
    return output;
}

}  // namespace vescale
