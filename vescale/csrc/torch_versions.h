// What the supported versions of torch have in different ways. Each is found by what the headers declare.

#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace vescale {

// Nodes of autograd count their references themselves from torch 2.13 on. Before, a `std::shared_ptr` owns them.
inline constexpr bool kNodesCountReferences = std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>;

template <class Node>
using NodePtr = std::conditional_t<kNodesCountReferences, c10::intrusive_ptr<Node>, std::shared_ptr<Node>>;
using WeakNodePtr = std::conditional_t<
    kNodesCountReferences, c10::weak_intrusive_ptr<torch::autograd::Node>, std::weak_ptr<torch::autograd::Node>>;

template <class Node, class... Arguments>
NodePtr<Node> make_node(Arguments&&... arguments) {
    if constexpr (kNodesCountReferences) {
        return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
    } else {
        // PyTorch's own, found by the argument: it frees long graphs without recursion.
        return {new Node(std::forward<Arguments>(arguments)...), [](Node* node) { deleteNode(node); }};
    }
}

// The node that a Python object of it holds, which may be a weak reference.
template <class Held>
NodePtr<torch::autograd::Node> node_held_by(const Held& held) {
    if constexpr (requires { held.lock(); }) {
        return held.lock();
    } else {
        return held;
    }
}

// The Python object of a node, borrowed; null: it has none.
template <class Node>
PyObject* object_of_node(const Node& node) {
    if constexpr (requires { node.pyobj_slot(); }) {
        return node.pyobj_slot()->load_pyobj();
    } else {
        return node.pyobj();
    }
}

// Whether the next function is called without torch functions, which torch 2.13 can be told.
template <class Tls>
bool skips_next() {
    if constexpr (requires { Tls::peek_skip_next(); }) {
        return Tls::peek_skip_next();
    } else {
        return false;
    }
}

// Collectives of a `c10d::ProcessGroup`, which had other names before torch 2.13.
template <class Group, class Options>
auto reduce_scatter(Group& group, at::Tensor& to, at::Tensor& from, const Options& options) {
    if constexpr (requires { group.reduce_scatter_single(to, from, options); }) {
        return group.reduce_scatter_single(to, from, options);
    } else {
        return group._reduce_scatter_base(to, from, options);
    }
}

template <class Group>
auto all_gather(Group& group, at::Tensor& to, at::Tensor& from) {
    if constexpr (requires { group.all_gather_single(to, from); }) {
        return group.all_gather_single(to, from);
    } else {
        return group._allgather_base(to, from);
    }
}

template <class Group, class Sizes>
auto all_to_all(Group& group, at::Tensor& to, at::Tensor& from, Sizes& receives, Sizes& sends) {
    if constexpr (requires { group.all_to_all_single(to, from, receives, sends); }) {
        return group.all_to_all_single(to, from, receives, sends);
    } else {
        return group.alltoall_base(to, from, receives, sends);
    }
}

}  // namespace vescale
