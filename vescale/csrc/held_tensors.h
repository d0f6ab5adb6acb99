// What the autograd graph of a forward holds until its backward, for reports.

#pragma once

#include "composite_node.h"

#include <torch/csrc/autograd/python_cpp_function.h>

namespace vescale {

// The tensors that a node of a composite holds; none for nodes of PyTorch, which tell Python themselves.
inline std::vector<at::Tensor> held_by(const py::object& node) {
    if (!torch::autograd::THPCppFunction_Check(node.ptr())) {
        return {};
    }
    auto* own = reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata.get();
    auto* composite = dynamic_cast<CompositeBackward*>(own);
    return composite == nullptr ? std::vector<at::Tensor>{} : composite->held();
}

// The node that has made a tensor, which is not kept.
class WeakNode {
  public:
    explicit WeakNode(const at::Tensor& tensor) : node_(tensor.grad_fn()) {}

    // None where the tensor is a leaf, or the graph has gone.
    py::object get() const {
        const auto node = node_.lock();
        return node ? py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node)) : py::none();
    }

  private:
    WeakNodePtr node_;
};

}  // namespace vescale
