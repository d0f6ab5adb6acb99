// `aten::layer_norm` on DTensors. Its mean and deviation, which only the backward reads, are not made to DTensors.

#pragma once

#include "composite_node.h"

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

class LayerNormBackward final : public CompositeBackward {
  public:
    explicit LayerNormBackward(c10::IntArrayRef shape)
        : CompositeBackward(Key(shape.begin(), shape.end())), shape_(shape.vec()) {}

    std::string name() const override { return "LayerNormBackward"; }

  protected:
    Parts& parts() const override { return layer_norm_backward(); }

    torch::autograd::variable_list run(
        c10::ArrayRef<at::Tensor> operands, const std::vector<at::Tensor>& kept, const Wanted& wanted) const override {
        auto found = at::native_layer_norm_backward(
            operands[0], operands[1], shape_, kept[0], kept[1], operands[2], operands[3], wanted);
        return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
    }

  private:
    std::vector<std::int64_t> shape_;
};

inline at::Tensor layer_norm(
    c10::DispatchKeySet keys, const at::Tensor& input, c10::SymIntArrayRef shape, const std::optional<at::Tensor>& given_weight,
    const std::optional<at::Tensor>& given_bias, double eps, bool cudnn_enable) {
    const at::Tensor weight = given_weight.value_or(at::Tensor()), bias = given_bias.value_or(at::Tensor());
    const auto sizes = c10::asIntArrayRefSlowOpt(shape);
    const std::array<at::Tensor, 3> operands{input, weight, bias};
    if (!sizes || !is_composable(operands)) {
        const at::impl::MaybeSetTLSOnEntryGuard guard;
        return at::_ops::layer_norm::redispatch(below(keys), input, shape, given_weight, given_bias, eps, cudnn_enable);
    }
    const bool is_differentiable = torch::autograd::compute_requires_grad(input, weight, bias);
    const auto run = [&](c10::ArrayRef<at::Tensor> given) -> std::vector<at::Tensor> {
        auto found = at::native_layer_norm(given[0], *sizes, given[1], given[2], eps);
        return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
    };
    std::vector<py::object> specs;
    const auto results = run_forward(layer_norm_forward(), operands, Key(sizes->begin(), sizes->end()), run, &specs);
    at::Tensor output = results[0];
    if (is_differentiable) {
        auto node = make_node<LayerNormBackward>(*sizes);
        node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
        for (const auto& operand : operands) {
            node->save(operand);
        }
        node->keep(results, std::move(specs));
        torch::autograd::set_history(output, node);
    }
    release(specs);
    return output;
}

}  // namespace vescale
