// Ops that PyTorch takes apart above autograd, such as linear: one kernel, one autograd node, and no DTensors in between.
//
// A composite's forward and backward are functions of tensors, which call the same ops as PyTorch's own. A function runs on
// DTensors first. If each op in it ran on the local tensors as they are, the whole function does so from then on, for
// operands with these specs. Sizes that it passes on are therefore those of the tensors that it computes with. Of one operand,
// which the function reads once, ops may take this rank's part or summand: as of a bias that every rank has whole.

#pragma once

#include "dispatch.h"
#include "links.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <string>

namespace vescale {

class Parts;

inline std::vector<Parts*>& all_parts() {
    static auto* made = new std::vector<Parts*>;
    return *made;
}

// Functions of one composite, by the specs of their operands. Lives as long as the process.
class Parts {
  public:
    // `divisible`: the operand that each function reads once; -1: none.
    explicit Parts(std::string name, int divisible = -1) : name_(std::move(name)), divisible_(divisible) {
        all_parts().push_back(this);
    }

    // The function's results. `operands`: exact DTensors, or undefined. `words` distinguish calls with equal operands. If
    // `kept` is given, results after the first are for the backward alone: local tensors, with their specs in `kept`.
    template <class Function>
    std::vector<at::Tensor> run(
        c10::ArrayRef<at::Tensor> operands, c10::ArrayRef<std::uint64_t> words, const Function& function,
        std::vector<py::object>* kept = nullptr) {
        if (!c10::impl::TorchDispatchModeTLS::any_modes_set()) {  // a mode sees each op on DTensors
            Gil gil;
            Key key(words.begin(), words.end());
            const auto epoch = self().epoch;
            if (add_specs(operands, key) && epoch == self().epoch) {
                const auto found = table_.find(key);
                if (found == table_.end()) {
                    return learn(std::move(key), operands, function, kept);
                }
                if (found->second.is_local) {
                    counts_.hits += 1;
                    return run_on_locals(found->second, operands, function, kept);
                }
            }
        }
        auto results = function(operands);
        Gil gil;
        keep_locals(results, kept);
        return results;
    }

    void clear() { retire(table_); }
    const std::string& name() const { return name_; }
    Counts& counts() { return counts_; }

  private:
    struct Known {
        bool is_local = false;
        std::vector<const Spec*> specs;  // of the results; null: undefined
        std::vector<Part> parts;         // of the divisible operand
    };
    using Table = std::unordered_map<Key, Known, KeyHash>;

    static bool add_specs(c10::ArrayRef<at::Tensor> operands, Key& key) {
        for (const at::Tensor& operand : operands) {
            PyObject* dtensor = operand.defined() ? dtensor_of(operand) : nullptr;
            const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
            if (operand.defined() && spec == nullptr) {
                return false;
            }
            if (spec != nullptr) {
                require_current(local_of(dtensor));
            }
            key.push_back(reinterpret_cast<std::uint64_t>(spec));
        }
        return true;
    }

    template <class Function>
    std::vector<at::Tensor> run_on_locals(
        const Known& known, c10::ArrayRef<at::Tensor> operands, const Function& function,
        std::vector<py::object>* kept) const {
        const Running running;  // what is known stays while the lock is given up
        const auto& specs = known.specs;
        std::int64_t numel = 0;
        c10::SmallVector<at::Tensor, 4> locals;
        for (const at::Tensor& operand : operands) {
            locals.push_back(operand.defined() ? local_of(dtensor_of(operand)) : at::Tensor());
            numel += operand.defined() ? elements_of(locals.back()) : 0;
        }
        std::vector<at::Tensor> results;
        {
            c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
            Unlocked unlocked(numel > kLargeCall);
            for (const auto& part : known.parts) {
                locals[divisible_] = part_of(locals[divisible_], part);
                WatchCalls::note_other();
            }
            results = function(locals);
        }
        for (const auto i : c10::irange(results.size())) {
            if (i > 0 && kept != nullptr) {
                kept->push_back(specs[i]->object);
            } else if (results[i].defined()) {
                results[i] = wrap(std::move(results[i]), *specs[i]);
            }
        }
        return results;
    }

    // Results after the first, which are for the backward, as local tensors, with their specs in `kept`: also where the function
    // ran on DTensors, so that a recomputation finds the same, whatever tables were cleared meanwhile. The lock is held.
    static void keep_locals(std::vector<at::Tensor>& results, std::vector<py::object>* kept) {
        if (kept == nullptr) {
            return;
        }
        std::vector<py::object> specs;
        for (std::size_t i = 1; i < results.size(); ++i) {
            PyObject* dtensor = results[i].defined() ? dtensor_of(results[i]) : nullptr;
            const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
            if (spec == nullptr) {
                return;
            }
            specs.push_back(spec->object);
        }
        for (std::size_t i = 1; i < results.size(); ++i) {
            results[i] = local_of(dtensor_of(results[i]));
        }
        kept->insert(kept->end(), specs.begin(), specs.end());
    }

    // Runs the function on the DTensors, and remembers whether that moved nothing. The lock is held.
    template <class Function>
    std::vector<at::Tensor> learn(
        Key key, c10::ArrayRef<at::Tensor> operands, const Function& function, std::vector<py::object>* kept) {
        const auto epoch = self().epoch;
        const double start = seconds_now();
        Known known;
        std::vector<at::Tensor> results;
        {
            Unlocked unlocked(true);
            const WatchCalls watch(divisible_ < 0 ? at::Tensor() : operands[divisible_]);
            results = function(operands);
            known.is_local = watch.all_local();
            known.parts = watch.parts();
        }
        if (!known.is_local || !known.parts.empty()) {
            WatchCalls::note_other();
        }
        counts_.misses += 1;
        counts_.seconds_of_misses += seconds_now() - start;
        for (const at::Tensor& result : results) {
            PyObject* dtensor = result.defined() ? dtensor_of(result) : nullptr;
            known.specs.push_back(dtensor == nullptr ? nullptr : spec_of(dtensor));
            known.is_local &= !result.defined() || known.specs.back() != nullptr;
        }
        keep_locals(results, kept);
        auto& our = self();
        if (epoch == our.epoch && our.num_entries < our.max_entries) {
            our.num_entries += table_.emplace(std::move(key), std::move(known)).second;
        }
        return results;
    }

    std::string name_;
    int divisible_;
    Table table_;
    Counts counts_;
};

// Whether all modes of this thread say that composites may run (`allows_composites`), whose ops they see without those that
// autograd would run between them.
inline bool modes_allow_composites() {
    using Tls = c10::impl::TorchDispatchModeTLS;
    if (!Tls::any_modes_set()) {
        return true;
    }
    Gil gil;
    for (const auto i : c10::irange(Tls::stack_len())) {
        const py::handle mode(Tls::get_stack_at(i)->ptr(getPyInterpreter()));
        if (!py::getattr(mode, "allows_composites", py::bool_(false)).cast<bool>()) {
            return false;
        }
    }
    return true;
}

// Whether a composite's kernel may take a call with these operands (some may be undefined): nobody asks for the ops that
// PyTorch makes of it, and nothing has to happen between autograd and them.
inline bool is_composable(c10::ArrayRef<at::Tensor> operands) {
    if (!is_active.load(std::memory_order_relaxed) || !modes_allow_composites() ||
        c10::InferenceMode::is_enabled() ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
        return false;
    }
    for (const at::Tensor& operand : operands) {
        if (operand.defined() &&
            (dtensor_of(operand) == nullptr || torch::autograd::isFwGradDefined(operand) ||
             at::autocast::is_autocast_enabled(operand.device().type()))) {
            return false;
        }
    }
    return true;
}

// The keys below the one of a composite's kernel: where PyTorch takes the op apart.
inline c10::DispatchKeySet below(c10::DispatchKeySet keys) {
    return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::PythonTLSSnapshot);
}

}  // namespace vescale
