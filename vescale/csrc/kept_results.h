// Results of a composite's forward that only its backward reads: statistics of a norm.

#pragma once

#include "composite.h"

namespace vescale {

// Drops references to Python objects where the interpreter's lock may not be held.
inline void release(std::vector<py::object>& objects) {
    if (objects.empty()) {
        return;
    }
    if (!Py_IsInitialized()) {  // the interpreter, and what it owned, has gone
        for (auto& object : objects) {
            object.release();
        }
        return;
    }
    Gil gil;
    objects.clear();
}

// Adds what a saved variable holds: nothing where hooks have packed it into something else than a tensor. The interpreter's
// lock is held.
inline void add_held(const torch::autograd::SavedVariable& saved, std::vector<at::Tensor>& found) {
    if (!saved.has_hooks()) {
        const auto data = saved.get_raw_data();
        if (data.has_value() && data->defined()) {
            found.push_back(*data);
        }
        return;
    }
    const auto packed = saved.retrieve_unpack_hook_data();
    if (packed.has_value()) {
        PyObject* data = packed->second.ptr(&packed->second.pyinterpreter());
        if (THPVariable_Check(data)) {
            found.push_back(THPVariable_Unpack(data));
        }
    }
}

// Saved by an autograd node. Where the forward ran on local tensors they are local tensors, and need their specs only if the
// backward does not.
class KeptResults {
  public:
    // `results` are those of Parts::run, of which the first is not kept. Called once.
    void save(const std::vector<at::Tensor>& results, std::vector<py::object> specs) {
        for (std::size_t i = 1; i < results.size(); ++i) {
            saved_.emplace_back(results[i], /*is_output=*/false);
        }
        specs_ = std::move(specs);
    }

    ~KeptResults() { vescale::release(specs_); }

    KeptResults() = default;
    KeptResults(const KeptResults&) = delete;
    KeptResults& operator=(const KeptResults&) = delete;

    void add_held(std::vector<at::Tensor>& found) const {
        for (const auto& saved : saved_) {
            vescale::add_held(saved, found);
        }
    }

    std::vector<at::Tensor> unpack() const {
        std::vector<at::Tensor> found;
        for (const auto& saved : saved_) {
            found.push_back(saved.unpack());
        }
        return found;
    }

    void release() {
        for (auto& saved : saved_) {
            saved.reset_data();
        }
    }

    // The unpacked results as a function of the backward meets them: local tensors beside local operands, DTensors beside
    // DTensors.
    std::vector<at::Tensor> beside(const at::Tensor& operand, std::vector<at::Tensor> unpacked) const {
        if (unpacked.empty()) {
            return unpacked;
        }
        const bool wants_local = !operand.key_set().has(c10::DispatchKey::Python);
        Gil gil;
        for (const auto i : c10::irange(unpacked.size())) {
            PyObject* dtensor = dtensor_of(unpacked[i]);
            if (wants_local && dtensor != nullptr) {
                unpacked[i] = local_of(dtensor);
            } else if (!wants_local && dtensor == nullptr) {
                unpacked[i] = wrap(unpacked[i], *add_spec(specs_[i].ptr()));
            }
        }
        return unpacked;
    }

  private:
    std::vector<torch::autograd::SavedVariable> saved_;
    std::vector<py::object> specs_;  // empty where the results are DTensors
};

}  // namespace vescale
