// Links between a DTensor and a copy of it that one device would not have made: on one device the two are one tensor.
//
// A link has the version counters of both, and not the tensors, so that it keeps no memory. An op that is about to read one
// of the two finds out from the versions whether the other has been written to since they were equal, and asks Python: to
// bring the copy up to date (copies that are viewed), or to raise (tensors that a module's boundary moved). Nothing happens at
// a write, and nothing depends on when tensors are freed, which may differ between ranks.

#pragma once

#include "call.h"
#include "dtensor.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <array>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace vescale {

struct Link {
    // Of the source and of the copy: the DTensor's version and its local tensor's, to which plain tensors may be views.
    struct Side {
        c10::weak_intrusive_ptr<c10::StorageImpl> storage;
        c10::VariableVersion whole, local;
        std::array<std::uint32_t, 2> seen{};  // when both sides were equal
    };
    Side source, copy;
    // What Python does about an old value that is about to be read: (a tensor on the copy's storage) -> None brings a view's
    // copy up to date; for others, (whether it is the copy) -> raises.
    py::object outdated;
    bool is_view = false;  // of the source, for autograd: both sides have one version, and writes to the copy reach the source
    bool is_stamped = true;  // the version of the source is known
    bool is_updating = false;
};

inline std::uint32_t number_of(const c10::VariableVersion& version) {
    return version.enabled() ? version.current_version() : 0;
}

inline c10::VariableVersion version_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter();
}

using Links = std::vector<std::shared_ptr<Link>>;

// By the storage of a side's local tensor. Read and written with the interpreter's lock held. A weak reference to a storage
// keeps its address from being used again.
inline std::unordered_map<c10::StorageImpl*, Links>& all_links() {
    static auto* made = new std::unordered_map<c10::StorageImpl*, Links>;
    return *made;
}

// Links that a view op has made, for which the version of its operand is still to be noted.
inline Links& unstamped() {
    static thread_local Links made;
    return made;
}

inline std::array<std::uint32_t, 2> versions_of(const Link::Side& side) {
    return {number_of(side.whole), number_of(side.local)};
}

inline bool has_changed(const Link::Side& side) {
    return versions_of(side) != side.seen;
}

inline Link::Side side_of(const at::Tensor& whole, const at::Tensor& local) {
    Link::Side side{c10::weak_intrusive_ptr<c10::StorageImpl>(local.storage().getWeakStorageImpl()), {}, version_of(local), {}};
    if (whole.defined()) {
        side.whole = version_of(whole);
    }
    side.seen = versions_of(side);
    return side;
}

// Whether nothing can find this link outdated any more: both sides have gone, or one, unchanged.
inline bool is_over(const Link& link) {
    const bool has_source = !link.source.storage.expired(), has_copy = !link.copy.storage.expired();
    return (!has_source && !has_copy) || (!has_copy && (link.is_view || !has_changed(link.copy))) ||
        (!has_source && !has_changed(link.source));
}

// Drops the links that are over, when the table has doubled.
inline void sweep_links() {
    static std::size_t limit = 256;
    auto& table = all_links();
    if (table.size() < limit) {
        return;
    }
    Links dropped;  // destroyed last: that may run Python
    for (auto entry = table.begin(); entry != table.end();) {
        auto& links = entry->second;
        for (auto link = links.begin(); link != links.end();) {
            if (is_over(**link)) {
                dropped.push_back(std::move(*link));
                link = links.erase(link);
            } else {
                ++link;
            }
        }
        entry = links.empty() ? table.erase(entry) : std::next(entry);
    }
    limit = std::max<std::size_t>(256, 2 * table.size());
}

inline void add_link(
    const at::Tensor& source, const at::Tensor& source_local, const at::Tensor& copy, const at::Tensor& copy_local,
    py::object outdated, bool is_view) {
    auto* from = source_local.storage().unsafeGetStorageImpl();
    auto* to = copy_local.storage().unsafeGetStorageImpl();
    if (from == to) {
        return;
    }
    sweep_links();
    auto link = std::make_shared<Link>(Link{side_of(source, source_local), side_of(copy, copy_local), std::move(outdated)});
    link->is_view = is_view;
    link->is_stamped = source.defined();
    if (!link->is_stamped) {
        unstamped().push_back(link);
    }
    all_links()[from].push_back(link);
    all_links()[to].push_back(std::move(link));
}

// An empty tensor, which has the storage of a side.
inline py::object on_storage(const Link::Side& side) {
    const c10::Storage storage(side.storage.lock());
    c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
    const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
    return owned(THPVariable_Wrap(at::empty({0}, options).set_(storage, 0, {0}, {1})));
}

// Before an op reads a DTensor. `depth` counts copies of copies.
inline void require_current(c10::StorageImpl* storage, int depth = 0) {
    const auto found = all_links().find(storage);
    if (found == all_links().end() || depth > 64) {
        return;
    }
    const Links links = found->second;  // Python may add some
    for (const auto& link : links) {
        if (!link->is_stamped || link->is_updating) {
            continue;
        }
        const bool is_copy = link->copy.storage._unsafe_get_target() == storage;
        if (is_copy) {
            if (auto source = link->source.storage.lock()) {
                require_current(source.get(), depth + 1);
            }
            if (has_changed(link->source)) {
                link->is_updating = true;
                try {
                    const py::object given = link->is_view ? on_storage(link->copy) : py::bool_(true);
                    owned(PyObject_CallOneArg(link->outdated.ptr(), given.ptr()));
                } catch (...) {
                    link->is_updating = false;
                    throw;
                }
                link->is_updating = false;
                link->source.seen = versions_of(link->source);
            }
        } else if (!link->is_view && has_changed(link->copy)) {
            owned(PyObject_CallOneArg(link->outdated.ptr(), Py_False));
        }
    }
}

inline void require_current(const at::Tensor& local) {
    if (!all_links().empty() && local.has_storage()) {
        require_current(local.storage().unsafeGetStorageImpl());
    }
}

// The lock is held.
inline void require_current_operands(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
    if (all_links().empty() || dtensor_class().type == nullptr) {
        return;
    }
    const auto require = [](const at::Tensor& tensor) {
        if (PyObject* dtensor = tensor.defined() ? dtensor_of(tensor) : nullptr) {
            require_current(local_of(dtensor));
        }
    };
    for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
        if (value.isTensor()) {
            require(value.toTensor());
        } else if (value.isTensorList()) {
            for (const at::Tensor& tensor : value.toTensorList()) {
                require(tensor);
            }
        }
    }
}

// The versions of a view op's operand, for the links that the op has made.
inline void stamp_links(const at::Tensor& operand) {
    auto pending = std::exchange(unstamped(), {});
    PyObject* dtensor = operand.defined() ? dtensor_of(operand) : nullptr;
    for (const auto& link : pending) {
        if (dtensor != nullptr && link->source.storage._unsafe_get_target() == local_of(dtensor).storage().unsafeGetStorageImpl()) {
            link->source.whole = version_of(operand);
            link->source.seen = versions_of(link->source);
            link->is_stamped = true;
        }
    }
}

// Writes to one count as writes to both.
inline void share_version(const at::Tensor& tensor, const at::Tensor& with) {
    if (!tensor.is_inference() && version_of(with).enabled()) {
        tensor.unsafeGetTensorImpl()->set_version_counter(version_of(with));
    }
}

// The same for a DTensor that was brought elsewhere to be viewed, without a view op: writes to one count as writes to both.
inline void stamp_copy(const at::Tensor& operand, const at::Tensor& copy) {
    share_version(copy, operand);
    stamp_links(operand);
}

// Local tensors of views have the version of the local tensor that they are views of.
inline void share_local_version(const at::Tensor& result, const at::Tensor& local) {
    PyObject* dtensor = result.defined() ? dtensor_of(result) : nullptr;
    if (dtensor == nullptr) {
        return;
    }
    const at::Tensor& own = local_of(dtensor);
    if (own.has_storage() && local.has_storage() && own.storage().is_alias_of(local.storage())) {
        share_version(own, local);
    }
}

// Two DTensors are equal again. `is_written`: by an op on the copy, after which the version will count one more.
inline void settle_links(const at::Tensor& copy_local, bool is_written) {
    const auto found = all_links().find(copy_local.storage().unsafeGetStorageImpl());
    if (found == all_links().end()) {
        return;
    }
    for (const auto& link : found->second) {
        if (link->copy.storage._unsafe_get_target() == found->first) {
            link->source.seen = versions_of(link->source);
            link->copy.seen = versions_of(link->copy);
            link->source.seen[0] += is_written && link->is_stamped ? 1 : 0;
        }
    }
}

}  // namespace vescale
