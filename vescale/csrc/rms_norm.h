// `aten::rms_norm` on DTensors of float32 and float64 on a CPU, with one autograd node. PyTorch makes it of six ops, each with a
// node, and two more for other types; on other devices it has a kernel of its own.

#pragma once

#include "composite_node.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/rms_norm_ops.h>

#include <limits>

namespace vescale {

inline Parts& rms_norm_forward() {
    static auto* made = new Parts("rms_norm");
    return *made;
}

inline Parts& rms_norm_backward() {
    static auto* made = new Parts("rms_norm_backward");
    return *made;
}

// What the input is multiplied by: one over the root of its mean square.
inline at::Tensor inverse_root(const at::Tensor& input, std::int64_t num_dims, double eps) {
    std::vector<std::int64_t> dims;
    for (auto dim = input.dim() - num_dims; dim < input.dim(); ++dim) {
        dims.push_back(dim);
    }
    return input.pow(2).mean(dims, /*keepdim=*/true).add_(eps).rsqrt();
}

// As PyTorch's own composite. The operands: input, weight. The results: the output, and what the input is multiplied by.
inline std::vector<at::Tensor> run_rms_norm(c10::ArrayRef<at::Tensor> operands, std::int64_t num_dims, double eps) {
    const auto factor = inverse_root(operands[0], num_dims, eps);
    auto output = operands[0].mul(factor);
    if (operands[1].defined()) {
        output = output.mul(operands[1]);
    }
    return {std::move(output), factor};
}

// As the backward of these ops. The operands: gradient, input, weight. The results: gradients of input and weight. `shape` are
// the global sizes of the dims that are normalized.
inline std::vector<at::Tensor> run_rms_norm_backward(
    c10::ArrayRef<at::Tensor> operands, const at::Tensor& factor, const Wanted& wanted, c10::IntArrayRef shape) {
    auto gradient = operands[0];
    const auto &input = operands[1], &weight = operands[2];
    std::vector<at::Tensor> found(2);
    const auto first = input.dim() - static_cast<std::int64_t>(shape.size());
    if (wanted[1]) {
        const auto product = gradient.mul(input.mul(factor));
        found[1] = at::sum_to(product, product.sizes().slice(first));
    }
    if (wanted[0]) {
        if (weight.defined()) {
            gradient = gradient.mul(weight);
        }
        const auto product = gradient.mul(input);
        auto sizes = product.sizes().vec();
        std::fill(sizes.begin() + first, sizes.end(), 1);
        const auto of_mean = at::sum_to(product, sizes).mul(-0.5).mul(factor.pow(3));
        const at::Scalar count(c10::multiply_integers(shape));
        const auto of_square = of_mean.expand(product.sizes()).div(count).mul(input.pow(1.0).mul(2.0));
        found[0] = gradient.mul(factor).add(of_square);
    }
    return found;
}

class RmsNormBackward final : public CompositeBackward {
  public:
    RmsNormBackward(c10::IntArrayRef shape, double eps)
        : CompositeBackward(Key(shape.begin(), shape.end())), shape_(shape.vec()), eps_(eps) {}

    std::string name() const override { return "RmsNormBackward"; }

  protected:
    Parts& parts() const override { return rms_norm_backward(); }

    torch::autograd::variable_list run(
        c10::ArrayRef<at::Tensor> operands, const std::vector<at::Tensor>& kept, const Wanted& wanted) const override {
        return run_rms_norm_backward(operands, kept[0], wanted, shape_);
    }

    torch::autograd::variable_list differentiate(
        c10::ArrayRef<at::Tensor> operands, const std::vector<at::Tensor>&, const Wanted& wanted) const override {
        const auto factor = inverse_root(operands[1], static_cast<std::int64_t>(shape_.size()), eps_);
        return run_rms_norm_backward(operands, factor, wanted, shape_);
    }

  private:
    std::vector<std::int64_t> shape_;
    double eps_;
};

// Whether PyTorch would make the op of the ops above, without an error or a warning.
inline bool is_normalizable(const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef shape) {
    const auto num_dims = static_cast<std::int64_t>(shape.size());
    const auto type = input.scalar_type();
    return input.device().is_cpu() && (type == at::kFloat || type == at::kDouble) && num_dims > 0 && input.dim() >= num_dims &&
        input.numel() > 0 && input.is_contiguous() && input.sizes().slice(input.dim() - num_dims) == shape &&
        (!weight.defined() || (weight.sizes() == shape && weight.scalar_type() == type));
}

inline at::Tensor rms_norm(
    c10::DispatchKeySet keys, const at::Tensor& input, c10::SymIntArrayRef shape, const std::optional<at::Tensor>& given_weight,
    std::optional<double> given_eps) {
    const at::Tensor weight = given_weight.value_or(at::Tensor());
    const auto sizes = c10::asIntArrayRefSlowOpt(shape);
    const std::array<at::Tensor, 2> operands{input, weight};
    bool is_ours = sizes && is_composable(operands) && is_normalizable(input, weight, *sizes);
    if (is_ours) {
        Gil gil;
        is_ours = local_of(dtensor_of(input)).is_contiguous();
    }
    if (!is_ours) {
        const at::impl::MaybeSetTLSOnEntryGuard guard;
        return at::_ops::rms_norm::redispatch(below(keys), input, shape, given_weight, given_eps);
    }
    const auto num_dims = static_cast<std::int64_t>(sizes->size());
    const double smallest = input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                               : std::numeric_limits<float>::epsilon();
    const double eps = given_eps.value_or(smallest);
    const bool is_differentiable = torch::autograd::compute_requires_grad(input, weight);
    const auto run = [&](c10::ArrayRef<at::Tensor> given) { return run_rms_norm(given, num_dims, eps); };
    std::vector<py::object> specs;
    const auto results = run_forward(rms_norm_forward(), operands, {static_cast<std::uint64_t>(num_dims)}, run, &specs);
    at::Tensor output = results[0];
    if (is_differentiable) {
        auto node = make_node<RmsNormBackward>(*sizes, eps);
        node->set_next_edges(torch::autograd::collect_next_edges(input, weight));
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
