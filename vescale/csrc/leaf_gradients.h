// Gradients of parameters, put where autograd would accumulate them, and taken from there for buckets.

#pragma once

#include "dtensor.h"
#include "tensor_memory.h"
#include "torch_versions.h"
#include "zero_signs.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace vescale {

// Of hook_gate.cpp: whether a hook would do nothing now; whether one counts gradients, and nobody has others; and whether that
// one has copied the local tensor of a gradient, with its spec, to a bucket.
using AboutHook = int (*)(void* hook);
using PlaceGradient = int (*)(void* hook, void* spec, void* gradient);

struct HookGate {
    AboutHook lets_pass = nullptr, is_only_count = nullptr;  // null: not built
    PlaceGradient place = nullptr;
};

inline HookGate& hook_gate() {
    static HookGate known;
    return known;
}

// An address, or 0, of the function of this name.
template <class Function>
Function function_at(std::uintptr_t address, const char* name) {
    auto* found = reinterpret_cast<void*>(address);
    Dl_info info;
    TORCH_CHECK_VALUE(
        address == 0 || (dladdr(found, &info) != 0 && info.dli_saddr == found && info.dli_sname == std::string(name)),
        "not the address of ", name);
    return reinterpret_cast<Function>(found);
}

// Addresses of the functions, or 0.
inline void set_hook_gate(std::uintptr_t lets_pass, std::uintptr_t is_only_count, std::uintptr_t place) {
    hook_gate() = {
        function_at<AboutHook>(lets_pass, "lets_pass"), function_at<AboutHook>(is_only_count, "is_only_count"),
        function_at<PlaceGradient>(place, "place_gradient")};
}

// A gradient that no other gradient shares its memory with, with the strides of `parameter` if there is one. A DTensor hides
// from autograd who else holds its local tensor, so that autograd would add to it in place, or give it to two parameters.
inline at::Tensor alone(at::Tensor gradient, const at::Tensor& parameter) {
    const bool is_dense = gradient.is_non_overlapping_and_dense();
    if (is_dense && torch::autograd::impl::is_tensor_stealable(gradient)) {
        return gradient;
    }
    return parameter.defined() ? torch::autograd::utils::clone_obey_contract(gradient, parameter)
                               : gradient.clone(is_dense ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
}

// Whether nothing but an edge holds the node that it leads to. A Python object of the node, which static mode makes of each when
// it records, holds it and lives as long as it does. The lock is held.
inline bool is_only_holder(const torch::autograd::Edge& edge) {
    const auto num_holders = edge.function.use_count();
    PyObject* object = object_of_node(*edge.function);
    return object == nullptr ? num_holders == 1 : num_holders == 2 && Py_REFCNT(object) == 1;
}

// Whether autograd would do nothing with a gradient that `node` sends along `edge`, to `leaf`, but make it the `grad` of the
// leaf, the Python object `parameter`, and count it. It does so where the gradient is put there and none is sent. The lock is
// held.
inline bool accumulates_plainly(
    torch::autograd::Node& node, const torch::autograd::Edge& edge, torch::autograd::AccumulateGrad& leaf, PyObject* parameter) {
    const at::Tensor& variable = leaf.variable;
    if (variable.grad().defined() || torch::autograd::AnomalyMode::is_enabled()) {
        return false;
    }
    if (!variable.requires_grad()) {  // frozen since the forward: autograd drops the gradient
        return false;
    }
    if (!is_only_holder(edge)) {  // others may send a part of the gradient, and the order of additions counts
        return false;
    }
    // torch.autograd.grad, and backward(inputs=...), accumulate in no leaf, or in some.
    const auto* execution = torch::autograd::get_current_graph_task_exec_info();
    if (execution == nullptr || !execution->empty()) {
        return false;
    }
    for (const auto& hook : torch::autograd::impl::hooks(variable)) {
        if (hook_gate().lets_pass == nullptr || hook_gate().lets_pass(hook.get()) == 0) {
            return false;
        }
    }
    const auto& after = torch::autograd::impl::post_acc_grad_hooks(variable);
    PyObject* hooks = reinterpret_cast<THPVariable*>(parameter)->post_accumulate_grad_hooks;
    const bool has_hooks = after != nullptr && (hooks == nullptr || !PyDict_Check(hooks) || PyDict_Size(hooks) != 0);
    const bool is_only_counted = has_hooks && hook_gate().is_only_count != nullptr && hook_gate().is_only_count(after.get()) != 0;
    if ((has_hooks && !is_only_counted) || !leaf.pre_hooks().empty() || !leaf.post_hooks().empty()) {
        return false;
    }
    return variable.is_cpu() || node.stream() == leaf.stream();  // else the engine orders the streams
}

// Whether a gradient is what the engine passes on, and keeps, as it is.
inline bool is_like(const at::Tensor& gradient, const at::Tensor& parameter) {
    return gradient.sizes() == parameter.sizes() && gradient.dtype() == parameter.dtype() &&
        gradient.device() == parameter.device() && gradient.strides() == parameter.strides();
}

// Puts gradients of parameters among those that `node` sends where autograd would put them, so that it does not make another
// tensor of each. They are its own, and nobody else has them. For any thread.
inline void give_to_leaves(torch::autograd::Node& node, torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled() || dtensor_class().type == nullptr) {
        return;
    }
    for (const auto i : c10::irange(gradients.size())) {
        auto* leaf = gradients[i].defined() ? dynamic_cast<torch::autograd::AccumulateGrad*>(node.next_edge(i).function.get())
                                            : nullptr;
        if (leaf == nullptr) {
            continue;
        }
        const Gil gil;
        PyObject *parameter = dtensor_of(leaf->variable), *gradient = dtensor_of(gradients[i]);
        if (parameter == nullptr || gradient == nullptr || !local_of(gradient).has_storage() ||
            local_of(gradient).storage().use_count() != 1) {
            continue;
        }
        const bool is_like_local = local_of(gradient).strides() == local_of(parameter).strides();
        if (is_like_local && is_like(gradients[i], leaf->variable) &&
            accumulates_plainly(node, node.next_edge(i), *leaf, parameter)) {
            leaf->variable.mutable_grad() = std::exchange(gradients[i], at::Tensor());
        }
    }
}

// The caller has compared the lengths of the lists.
inline const at::Tensor& tensor_at(const py::list& list, Py_ssize_t i) {
    return tensor_of(PyList_GET_ITEM(list.ptr(), i));
}

// What can be copied to `target` of a gradient, which has this spec or, with None, is plain; null: nothing.
inline const at::Tensor* takeable(const at::Tensor& gradient, PyObject* spec, const at::Tensor& target) {
    const at::Tensor* local = &gradient;
    if (!gradient.defined() || gradient.requires_grad()) {
        return nullptr;
    }
    if (spec != Py_None) {
        PyObject* dtensor = dtensor_of(gradient);
        const bool is_expected = dtensor != nullptr && slot(dtensor, dtensor_class().spec_slot) == spec &&
            THPVariable_CheckExact(slot(dtensor, dtensor_class().local_slot));
        if (!is_expected) {
            return nullptr;
        }
        local = &local_of(dtensor);
    }
    const bool is_alike = local->key_set() == target.key_set() && local->dtype() == target.dtype() &&
        local->sizes() == target.sizes() && local->is_contiguous() && target.is_contiguous() && target.is_cpu() &&
        has_memory(*local) && has_memory(target);
    const bool may_be_overwritten =
        is_alike && local->const_data_ptr() != target.const_data_ptr() && local->is_alias_of(target);
    return is_alike && !may_be_overwritten ? local : nullptr;
}

// What an object lets others read; nothing of None.
class Bytes {
  public:
    explicit Bytes(const py::object& holder) {
        if (!holder.is_none() && PyObject_GetBuffer(holder.ptr(), &view_, PyBUF_SIMPLE) != 0) {
            throw python_error();
        }
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;

    std::uint8_t at(std::size_t index) const {
        TORCH_CHECK_VALUE(index < static_cast<std::size_t>(view_.len), "no slot ", index);
        return static_cast<const std::uint8_t*>(view_.buf)[index];
    }

  private:
    Py_buffer view_{};
};

// Copies `grad` of each parameter, the local tensor of a DTensor with its spec, to its target, and leaves none. Returns False,
// and changes nothing, unless each is there, like its target, and in its place already or in other memory than all of them,
// which are in one block.
//
// `placed`: the bytes of the slots of a bucket, or None. Where that of a parameter's slot, which is in `indices`, is not 0, the
// gradient is in its target, and there is none in `grad`. `zeroes_signs`: see `zero_sign`; targets are not empty.
inline bool take_local_grads(
    const py::list& parameters, const py::list& specs, const py::list& targets, const py::object& placed, const py::list& indices,
    bool zeroes_signs) {
    const auto count = PyList_GET_SIZE(parameters.ptr());
    TORCH_CHECK_VALUE(
        PyList_GET_SIZE(specs.ptr()) == count && PyList_GET_SIZE(targets.ptr()) == count &&
            (placed.is_none() || PyList_GET_SIZE(indices.ptr()) == count),
        "lists of different lengths");
    if (dtensor_class().type == nullptr) {
        return false;
    }
    const Bytes bytes(placed);
    std::vector<const at::Tensor*> locals;
    std::vector<c10::IValue> copied;
    for (Py_ssize_t i = 0; i < count; ++i) {
        const auto& target = tensor_at(targets, i);
        const at::Tensor& gradient = tensor_at(parameters, i).grad();
        const bool is_there =
            !placed.is_none() && bytes.at(py::handle(PyList_GET_ITEM(indices.ptr(), i)).cast<std::size_t>()) != 0;
        locals.push_back(is_there ? nullptr : takeable(gradient, PyList_GET_ITEM(specs.ptr(), i), target));
        if (is_there ? gradient.defined() : locals.back() == nullptr) {
            return false;
        }
    }
    at::RecordFunction profiled(at::RecordScope::FUNCTION);
    if (profiled.isActive()) {  // its inputs are what is copied
        for (Py_ssize_t i = 0; profiled.needsInputs() && i < count; ++i) {
            if (locals[i] != nullptr && locals[i]->const_data_ptr() != tensor_at(targets, i).const_data_ptr()) {
                copied.emplace_back(*locals[i]);
            }
        }
        profiled.before("vescale::take_grads", c10::ArrayRef<const c10::IValue>(copied.data(), copied.size()));
    }
    std::vector<at::Tensor> taken;  // whose ends may run Python
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (locals[i] == nullptr) {
            continue;
        }
        const at::Tensor& target = tensor_at(targets, i);
        void* place = target.mutable_data_ptr();
        if (place != locals[i]->const_data_ptr()) {
            std::memcpy(place, locals[i]->const_data_ptr(), locals[i]->nbytes());
        }
        if (zeroes_signs) {
            zero_sign(target);
        }
        taken.push_back(std::exchange(tensor_at(parameters, i).mutable_grad(), at::Tensor()));
    }
    return true;
}

// Makes each gradient its parameter's. Returns False, and changes nothing, if one has a gradient.
inline bool give_grads(const py::list& parameters, const py::list& gradients) {
    const auto count = PyList_GET_SIZE(parameters.ptr());
    TORCH_CHECK_VALUE(PyList_GET_SIZE(gradients.ptr()) == count, "lists of different lengths");
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (tensor_at(parameters, i).grad().defined()) {
            return false;
        }
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        tensor_at(parameters, i).mutable_grad() = tensor_at(gradients, i);
    }
    return true;
}

enum class Gradients : int { kNone, kComplete, kOther };

// What `grad` of some parameters is: None of all; a DTensor of each, with its spec and an ordinary local tensor; or else.
inline int gradients_of(const py::list& parameters, const py::list& specs) {
    bool is_any = false;
    bool is_all = dtensor_class().type != nullptr && PyList_GET_SIZE(specs.ptr()) == PyList_GET_SIZE(parameters.ptr());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters.ptr()); ++i) {
        const at::Tensor& gradient = tensor_at(parameters, i).grad();
        is_any |= gradient.defined();
        if (!is_all || !gradient.defined()) {
            is_all = false;
            continue;
        }
        PyObject* dtensor = dtensor_of(gradient);
        is_all = dtensor != nullptr && slot(dtensor, dtensor_class().spec_slot) == PyList_GET_ITEM(specs.ptr(), i) &&
            THPVariable_CheckExact(slot(dtensor, dtensor_class().local_slot)) && !gradient.requires_grad();
    }
    return static_cast<int>(!is_any ? Gradients::kNone : is_all ? Gradients::kComplete : Gradients::kOther);
}

// Whether each DTensor has its local tensor and spec, and nothing but these lists holds it, or its local tensor.
inline bool are_dtensors_unheld(const py::list& dtensors, const py::list& locals, const py::list& specs) {
    const auto count = PyList_GET_SIZE(dtensors.ptr());
    TORCH_CHECK_VALUE(
        PyList_GET_SIZE(locals.ptr()) == count && PyList_GET_SIZE(specs.ptr()) == count, "lists of different lengths");
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* dtensor = PyList_GET_ITEM(dtensors.ptr(), i);
        PyObject* local = PyList_GET_ITEM(locals.ptr(), i);
        const at::Tensor& tensor = tensor_at(dtensors, i);
        const bool is_as_made = dtensor_of(tensor) == dtensor && slot(dtensor, dtensor_class().local_slot) == local &&
            slot(dtensor, dtensor_class().spec_slot) == PyList_GET_ITEM(specs.ptr(), i) && !tensor.requires_grad();
        if (!is_as_made || Py_REFCNT(dtensor) != 1 || tensor.use_count() != 1 || Py_REFCNT(local) != 2 ||
            tensor_of(local).use_count() != 1) {
            return false;
        }
    }
    return true;
}

}  // namespace vescale
