// Between DTensors and plain tensors, in autograd: local tensors that enter and leave a computation, and tensors that every
// rank has. Functions of the same names in vescale/ops/_conversion.py say what they do; each answers None where Python has to.

#pragma once

#include "conversion.h"
#include "leaf_gradients.h"
#include "python_node.h"

#include <unordered_map>
#include <utility>

namespace vescale {

// What a table knows of a crossing: of tensors of one layout, between plain tensors and DTensors.
struct Crossing {
    std::vector<py::object> held;  // what the key has addresses of
    const Spec* spec = nullptr;  // of the DTensor; null: Python makes it
    py::object grad_placements;  // by default
    Move move;  // of a tensor that every rank has
};

struct LocalRegions {
    // Each answers None where Python has to.
    py::object gradient_spec;  // (local gradient, spec, placements or None) -> (spec of the gradient,)
    py::object leaving;  // (local tensor, mesh, placements, shape) -> (spec, placements of the gradient)
    py::object wrapping;  // (tensor, mesh, placements) -> (spec, placements of the gradient, NativeMove or None)
    // Gradients in Python, linked in autograd where gradients of gradients are wanted.
    py::object enter_gradient;  // (local gradient, spec, placements or None) -> DTensor
    py::object leave_gradient;  // (DTensor, spec, placements, op) -> local gradient
    py::object wrap_gradient;  // (DTensor, mesh, requester) -> gradient
    std::unordered_map<Key, std::shared_ptr<const Crossing>, KeyHash> crossings;
    std::uint64_t epoch = 0;
};

inline LocalRegions& local_regions() {
    static auto* made = new LocalRegions;
    return *made;
}

enum class Way : std::uint64_t { kGradient, kLeave, kWrap };

// What is known of the crossing of `tensor`, or what `ask` answers for it: a tuple with a spec first, or None.
template <class Ask>
std::shared_ptr<const Crossing> find_crossing(
    Way way, const at::Tensor& tensor, std::initializer_list<py::object> held, c10::IntArrayRef shape, const Ask& ask) {
    auto& our = local_regions();
    if (our.epoch != self().epoch || our.crossings.size() >= self().max_entries) {
        const auto before = std::exchange(our.crossings, {});
        our.epoch = self().epoch;
    }
    Key key{static_cast<std::uint64_t>(way), static_cast<std::uint64_t>(tensor.scalar_type())};
    for (const auto& object : held) {
        key.push_back(reinterpret_cast<std::uint64_t>(object.ptr()));
    }
    key.push_back(static_cast<std::uint64_t>(tensor.dim()));
    key.append(tensor.sizes().begin(), tensor.sizes().end());
    key.append(tensor.strides().begin(), tensor.strides().end());
    key.append(shape.begin(), shape.end());
    const auto found = our.crossings.find(key);
    if (found != our.crossings.end()) {
        return found->second;
    }
    auto crossing = std::make_shared<Crossing>();
    crossing->held = held;
    const auto epoch = self().epoch;
    const py::object answer = ask(to_object(tensor));
    if (!answer.is_none()) {
        const auto parts = answer.cast<py::tuple>();
        crossing->spec = add_spec(parts[0].ptr());
        if (parts.size() > 1) {
            crossing->grad_placements = kept(parts[1]);
        }
        crossing->move.target = crossing->spec;
        if (parts.size() > 2 && !parts[2].is_none()) {
            crossing->move.program.emplace(parts[2].cast<py::tuple>());
        }
    }
    if (epoch == self().epoch) {  // otherwise the tables were cleared meanwhile
        our.crossings.emplace(std::move(key), crossing);
    }
    return crossing;
}

inline py::object borrowed(py::handle object) {
    return py::reinterpret_borrow<py::object>(object);
}

// Whether Python has to link a plain tensor.
inline bool is_unusual(const at::Tensor& plain) {
    return is_seen() || !is_plain(plain) || torch::autograd::isFwGradDefined(plain);
}

inline bool is_linked(const at::Tensor& tensor) {
    return at::GradMode::is_enabled() && tensor.requires_grad();
}

// The spec of a local gradient of a tensor with the spec `like`; null: Python makes the DTensor. A `Running` is there.
inline const Spec* gradient_spec(const at::Tensor& gradient, const py::object& like, const py::object& placements) {
    const auto crossing = find_crossing(Way::kGradient, gradient, {like, placements}, {}, [&](const py::object& given) {
        return local_regions().gradient_spec(given, like, placements);
    });
    return crossing->spec;
}

// The DTensor with the local gradient of a tensor with the spec `like`.
inline at::Tensor global_gradient(const at::Tensor& gradient, const py::object& like, const py::object& placements) {
    if (!at::GradMode::is_enabled() && is_plain(gradient) && dtensor_class().type != nullptr) {
        const Running running;
        const Spec* spec = gradient_spec(gradient, like, placements);
        if (spec != nullptr) {
            return wrap(gradient, *spec);
        }
    }
    return to_tensor(local_regions().enter_gradient(to_object(gradient), like, placements));
}

// Of the local tensors of some DTensors; holds the spec and the gradient's placements of each.
class EnterLocalBackward final : public PythonNode {
  public:
    EnterLocalBackward(std::vector<py::object> objects, std::vector<std::optional<std::pair<Sizes, at::TensorOptions>>> unused)
        : PythonNode(std::move(objects)), unused_(std::move(unused)) {}

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        const Gil gil;
        torch::autograd::variable_list found(gradients.size());
        for (const auto i : c10::irange(gradients.size())) {
            at::Tensor& gradient = gradients[i];
            if (!gradient.defined() && unused_[i]) {
                gradient = at::zeros(unused_[i]->first, unused_[i]->second);
            }
            if (gradient.defined() && task_should_compute_output(i)) {
                give(i, std::move(gradient), found[i]);
            }
        }
        return found;
    }

    std::string name() const override { return "EnterLocalBackward"; }

  private:
    // A parameter's gradient is put into its `grad` where autograd would do nothing else with it; other gradients go to `found`.
    void give(std::size_t i, at::Tensor gradient, at::Tensor& found) {
        auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(next_edge(i).function.get());
        if (!at::GradMode::is_enabled() && is_plain(gradient) && dtensor_class().type != nullptr) {
            const at::Tensor none, &parameter = leaf == nullptr ? none : leaf->variable;
            PyObject* dtensor = parameter.defined() ? dtensor_of(parameter) : nullptr;
            const Running running;
            if (dtensor != nullptr && goes_to_bucket(i, gradient, *leaf, dtensor)) {
                return;
            }
            gradient = alone(std::move(gradient), dtensor == nullptr ? none : local_of(dtensor));
            const Spec* spec = gradient_spec(gradient, held(2 * i), held(2 * i + 1));
            if (spec != nullptr) {
                found = wrap(std::move(gradient), *spec);
                if (dtensor != nullptr && accumulates_plainly(*this, next_edge(i), *leaf, dtensor) && is_like(found, parameter)) {
                    parameter.mutable_grad() = std::exchange(found, at::Tensor());
                }
                return;
            }
        }
        found = to_tensor(local_regions().enter_gradient(to_object(gradient), held(2 * i), held(2 * i + 1)));
    }

    // Whether a gradient has been copied to the bucket in which it is reduced, so that no DTensor is made of it.
    bool goes_to_bucket(std::size_t i, at::Tensor& gradient, torch::autograd::AccumulateGrad& leaf, PyObject* dtensor) {
        const at::Tensor& parameter = leaf.variable;
        const auto& after = torch::autograd::impl::post_acc_grad_hooks(parameter);
        if (after == nullptr || hook_gate().place == nullptr || !gradient.is_contiguous() ||
            !accumulates_plainly(*this, next_edge(i), leaf, dtensor)) {
            return false;
        }
        const Spec* spec = gradient_spec(gradient, held(2 * i), held(2 * i + 1));
        return spec != nullptr && parameter.sizes() == c10::IntArrayRef(spec->sizes) &&
            hook_gate().place(after.get(), spec->object.ptr(), &gradient) != 0;
    }

    std::vector<std::optional<std::pair<Sizes, at::TensorOptions>>> unused_;  // gradients of zeros where there are none
};

// The local tensors of DTensors, linked by one node; None where Python has to do it. `grad_placements` has a tuple, or None, for
// each.
inline py::object enter_together(const py::tuple& operands, const py::tuple& grad_placements, bool always) {
    std::vector<at::Tensor> tensors, locals;
    std::vector<py::object> objects;
    std::vector<std::optional<std::pair<Sizes, at::TensorOptions>>> unused;
    bool is_any_linked = false;
    if (is_seen()) {
        return py::none();
    }
    for (const auto i : c10::irange(operands.size())) {
        PyObject* object = PyTuple_GET_ITEM(operands.ptr(), i);
        if (!THPVariable_Check(object)) {
            return py::none();
        }
        const at::Tensor& tensor = THPVariable_Unpack(object);
        PyObject* dtensor = dtensor_of(tensor);
        const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
        if (spec == nullptr || torch::autograd::isFwGradDefined(tensor) || !is_plain(local_of(dtensor))) {
            return py::none();
        }
        require_current(local_of(dtensor));
        is_any_linked |= is_linked(tensor);
        const py::object placements = grad_placements[i];
        tensors.push_back(tensor);
        locals.push_back(local_of(dtensor).detach());
        objects.push_back(spec->object);
        objects.push_back(placements.is_none() ? placements : kept(placements));
        unused.emplace_back();
        if (always) {
            unused.back().emplace(Sizes(locals[i].sizes().begin(), locals[i].sizes().end()), locals[i].options());
        }
    }
    if (is_any_linked) {
        auto node = make_node<EnterLocalBackward>(std::move(objects), std::move(unused));
        node->set_next_edges(torch::autograd::collect_next_edges(tensors));
        if (std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.is_leaf(); })) {
            // As soon as its gradient is complete, like the node behind it that accumulates the gradient: reductions of
            // gradients then start during backward, also where the local tensor is older than the forward.
            node->set_sequence_nr(UINT64_MAX);
        }
        for (const auto& local : locals) {
            torch::autograd::set_history(
                torch::autograd::isDifferentiableType(local.scalar_type()) ? local : at::Tensor(), node);
        }
    }
    py::tuple made(locals.size());
    for (const auto i : c10::irange(locals.size())) {
        made[i] = to_object(locals[i]);
    }
    return made;
}

// The DTensor of a gradient and its spec; nulls where Python converts it, as for second derivatives. The lock is held.
inline std::pair<PyObject*, const Spec*> movable(const at::Tensor& gradient) {
    PyObject* dtensor = at::GradMode::is_enabled() || dtensor_class().type == nullptr ? nullptr : dtensor_of(gradient);
    return {dtensor, dtensor == nullptr ? nullptr : spec_of(dtensor)};
}

// The local gradient of a tensor that has become a DTensor with `spec`. The lock is held.
inline at::Tensor left_gradient(
    const at::Tensor& gradient, const py::object& spec, const py::object& placements, const py::object& op) {
    const auto [dtensor, found] = movable(gradient);
    if (found != nullptr) {
        const Running running;
        const auto move = move_between(found, placements.ptr());
        if (move->target != nullptr && !move->program) {
            return local_of(dtensor);
        }
    }
    return to_tensor(local_regions().leave_gradient(to_object(gradient), spec, placements, op));
}

// Holds the spec, the gradient's placements, and the name of the op.
class LeaveLocalBackward final : public PythonNode {
  public:
    using PythonNode::PythonNode;

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        if (!gradients[0].defined()) {
            return {at::Tensor()};
        }
        const Gil gil;
        return {left_gradient(gradients[0], held(0), held(1), held(2))};
    }

    std::string name() const override { return "LeaveLocalBackward"; }
};

// A DTensor of global `shape` around a local tensor; None where Python has to make it.
inline py::object leave_local(
    const at::Tensor& local, py::handle mesh, py::handle placements, py::handle shape, py::handle op,
    py::handle grad_placements) {
    if (is_unusual(local)) {
        return py::none();
    }
    Sizes sizes;
    const auto numbers = owned(PySequence_Tuple(shape.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers.ptr()); ++i) {
        PyObject* number = PyTuple_GET_ITEM(numbers.ptr(), i);
        if (!PyLong_CheckExact(number)) {
            return py::none();
        }
        sizes.push_back(py::handle(number).cast<std::int64_t>());
    }
    const Running running;
    const py::object own = kept(placements);
    const auto crossing = find_crossing(Way::kLeave, local, {borrowed(mesh), own}, sizes, [&](const py::object& given) {
        return local_regions().leaving(given, mesh, own, numbers);
    });
    if (crossing->spec == nullptr) {
        return py::none();
    }
    at::Tensor made = wrap(local.detach(), *crossing->spec);
    if (is_linked(local)) {
        auto node = make_node<LeaveLocalBackward>(std::vector<py::object>{
            crossing->spec->object, grad_placements.is_none() ? crossing->grad_placements : kept(grad_placements),
            borrowed(op)});
        node->set_next_edges(torch::autograd::collect_next_edges(local));
        torch::autograd::set_history(made, node);
    }
    return to_object(made);
}

// Holds the mesh, the placements of the gradient, and the requester.
class WrapGlobalBackward final : public PythonNode {
  public:
    using PythonNode::PythonNode;

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        const at::Tensor& gradient = gradients[0];
        if (!gradient.defined()) {
            return {at::Tensor()};
        }
        const Gil gil;
        const auto [dtensor, spec] = movable(gradient);
        if (spec != nullptr) {
            const Running running;
            at::Tensor whole = moved(local_of(dtensor), *move_between(spec, held(1).ptr()));
            if (whole.defined()) {
                return {std::move(whole)};
            }
        }
        return {to_tensor(local_regions().wrap_gradient(to_object(gradient), held(0), held(2)))};
    }

    std::string name() const override { return "WrapGlobalBackward"; }
};

inline std::shared_ptr<const Crossing> find_wrapping(const at::Tensor& tensor, py::handle mesh, const py::object& placements) {
    return find_crossing(Way::kWrap, tensor, {borrowed(mesh), placements}, {}, [&](const py::object& given) {
        return local_regions().wrapping(given, mesh, placements);
    });
}

// How a tensor that every rank has becomes a DTensor, and its local tensor, which is undefined where Python has to move it.
inline std::pair<std::shared_ptr<const Crossing>, at::Tensor> part_of_global(
    const at::Tensor& tensor, py::handle mesh, py::handle placements) {
    auto crossing = find_wrapping(tensor, mesh, kept(placements));
    at::Tensor local = moved(crossing->move.program ? tensor : tensor.detach(), crossing->move);
    return {std::move(crossing), std::move(local)};
}

// A DTensor of a tensor that every rank has; None where Python has to make it.
inline py::object wrap_global(const at::Tensor& tensor, py::handle mesh, py::handle placements, py::handle requester) {
    if (is_unusual(tensor)) {
        return py::none();
    }
    const Running running;
    auto [crossing, local] = part_of_global(tensor, mesh, placements);
    if (!local.defined()) {
        return py::none();
    }
    at::Tensor made = wrap(std::move(local), *crossing->spec);
    share_outer_version(made, tensor);  // so that backward refuses what it has saved when the caller has written to it since
    if (is_linked(tensor)) {
        auto node = make_node<WrapGlobalBackward>(
            std::vector<py::object>{borrowed(mesh), crossing->grad_placements, borrowed(requester)});
        node->set_next_edges(torch::autograd::collect_next_edges(tensor));
        torch::autograd::set_history(made, node);
    }
    return to_object(made);
}

inline void set_local_regions(
    py::object gradient_spec, py::object leaving, py::object wrapping, py::object enter_gradient, py::object leave_gradient,
    py::object wrap_gradient) {
    auto& our = local_regions();
    our.crossings.clear();
    our.gradient_spec = std::move(gradient_spec);
    our.leaving = std::move(leaving);
    our.wrapping = std::move(wrapping);
    our.enter_gradient = std::move(enter_gradient);
    our.leave_gradient = std::move(leave_gradient);
    our.wrap_gradient = std::move(wrap_gradient);
}

}  // namespace vescale
