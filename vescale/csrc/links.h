// DTensors that are one tensor on one device, and are several here because data moved between them.
//
// Two kinds: the tensors before and behind the boundaries of modules (`Group`), which have one version for autograd, and a tensor
// and the copy of it that is viewed in its place (`ViewLink`). Every write to a DTensor counts in the version of its local
// tensor. These counters are held, and not the tensors, so that no memory is kept. An op that is about to read one of them finds
// out whether another has been written to, and asks Python to raise, or to bring the copy up to date. Nothing happens at a write,
// and nothing depends on when tensors are freed, which may differ between ranks.

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

inline c10::VariableVersion version_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter();
}

// A local tensor; views of it, also plain ones, have its version.
struct Side {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion version;
    std::uint32_t seen = 0;

    explicit Side(const at::Tensor& local) : storage(local.storage().getWeakStorageImpl()), version(version_of(local)) {
        see();
    }

    std::uint32_t now() const { return version.enabled() ? version.current_version() : 0; }
    bool has_changed() const { return now() != seen; }
    void see() { seen = now(); }
    bool is_on(const c10::StorageImpl* other) const { return storage._unsafe_get_target() == other; }
};

// Tensors that were equal when their members were added.
struct Group {
    struct Member {
        Side side;
        std::uint64_t edition;  // which values it holds
        py::object outdated;  // () -> raises; of the boundary that made it, or that made the first copy of it
    };
    std::vector<Member> members;
    std::uint64_t edition = 0;  // the newest values

    // Takes note of writes. Two members that were both written to leave values that nobody holds.
    void update() {
        bool is_any_written = false;
        for (auto& member : members) {
            if (member.side.has_changed()) {
                member.side.see();
                const bool held_newest = member.edition == edition && !is_any_written;
                member.edition = held_newest ? edition + 1 : 0;
                is_any_written = true;
            }
        }
        edition += is_any_written;
    }
};

struct ViewLink {
    Side source, copy;
    py::object outdated;  // (an empty tensor on the copy's storage) -> None; brings the copy up to date
    bool is_updating = false;
};

// What is known of a storage. Read and written with the interpreter's lock held.
struct Known {
    std::shared_ptr<Group> group;
    std::shared_ptr<ViewLink> view;  // the storage is its copy's
};

// A weak reference to a storage keeps its address from being used again.
inline std::unordered_map<c10::StorageImpl*, Known>& all_links() {
    static auto* made = new std::unordered_map<c10::StorageImpl*, Known>;
    return *made;
}

// Drops what no tensor can find any more, when the table has doubled.
inline void sweep_links() {
    static std::size_t limit = 256;
    auto& table = all_links();
    if (table.size() < limit) {
        return;
    }
    std::vector<Known> dropped;  // destroyed last: that may run Python
    for (auto entry = table.begin(); entry != table.end();) {
        auto& [storage, known] = *entry;
        bool is_alive = known.view && !known.view->copy.storage.expired();
        if (known.group) {
            for (const auto& member : known.group->members) {
                is_alive |= member.side.is_on(storage) && !member.side.storage.expired();
            }
        }
        if (is_alive) {
            ++entry;
            continue;
        }
        if (known.group) {
            known.group->update();
            auto& members = known.group->members;
            for (auto member = members.begin(); member != members.end();) {
                if (member->side.is_on(storage)) {
                    dropped.emplace_back(Known{std::make_shared<Group>(Group{{std::move(*member)}}), nullptr});
                    members.erase(member);
                    break;
                }
                ++member;
            }
        }
        dropped.push_back(std::move(known));
        entry = table.erase(entry);
    }
    limit = std::max<std::size_t>(256, 2 * table.size());
}

// The local tensor `copy` was made of `source` at a boundary.
inline void add_to_group(const at::Tensor& source, const at::Tensor& copy, const py::object& outdated) {
    auto* from = source.storage().unsafeGetStorageImpl();
    auto* to = copy.storage().unsafeGetStorageImpl();
    if (from == to) {
        return;
    }
    sweep_links();
    auto& group = all_links()[from].group;
    if (!group) {
        group = std::make_shared<Group>();
        group->members.push_back({Side(source), 0, outdated});
    }
    group->update();
    group->members.push_back({Side(copy), group->edition, outdated});
    auto shared = group;
    all_links()[to].group = std::move(shared);
}

// `copy` is to be viewed in place of `local`.
inline void add_view(const at::Tensor& local, const at::Tensor& copy, py::object outdated) {
    sweep_links();
    auto link = std::make_shared<ViewLink>(ViewLink{Side(local), Side(copy), std::move(outdated)});
    all_links()[copy.storage().unsafeGetStorageImpl()].view = std::move(link);
}

// An empty tensor, which has the storage of a side.
inline py::object on_storage(const Side& side) {
    const c10::Storage storage(side.storage.lock());
    c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
    const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
    return owned(THPVariable_Wrap(at::empty({0}, options).set_(storage, 0, {0}, {1})));
}

// Before an op reads a DTensor whose local tensor has this storage. `depth` counts copies of copies.
inline void require_current(c10::StorageImpl* storage, int depth = 0) {
    const auto found = all_links().find(storage);
    if (found == all_links().end() || depth > 64) {
        return;
    }
    const Known known = found->second;  // Python may add some
    if (known.view && !known.view->is_updating) {
        auto& link = *known.view;
        if (const auto source = link.source.storage.lock()) {
            require_current(source.get(), depth + 1);
        }
        if (link.source.has_changed()) {
            link.is_updating = true;
            try {
                owned(PyObject_CallOneArg(link.outdated.ptr(), on_storage(link.copy).ptr()));
            } catch (...) {
                link.is_updating = false;
                throw;
            }
            link.is_updating = false;
            link.source.see();
        }
    }
    if (known.group) {
        known.group->update();
        for (const auto& member : known.group->members) {
            if (member.side.is_on(storage) && member.edition != known.group->edition) {
                const auto outdated = member.outdated;
                owned(PyObject_CallNoArgs(outdated.ptr()));
            }
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

// Writes to one count as writes to both.
inline void share_version(const at::Tensor& tensor, const at::Tensor& with) {
    if (!tensor.is_inference() && version_of(with).enabled()) {
        tensor.unsafeGetTensorImpl()->set_version_counter(version_of(with));
    }
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

// An op has written to a copy that is viewed, and by that to its source, where nothing has counted the write.
inline void settle_view(const at::Tensor& copy) {
    const auto found = all_links().find(copy.storage().unsafeGetStorageImpl());
    if (found != all_links().end() && found->second.view) {
        auto& source = found->second.view->source;
        if (source.version.enabled()) {
            source.version.bump();
        }
        source.see();
    }
}

// Counts a write to a DTensor.
inline void count_write(const at::Tensor& local) {
    if (!local.is_inference()) {
        local.unsafeGetTensorImpl()->bump_version();
    }
}

// Members of a group: both have the values of `written`, the newest ones, now.
inline void settle_group(const at::Tensor& written, const at::Tensor& other) {
    const auto found = all_links().find(written.storage().unsafeGetStorageImpl());
    if (found == all_links().end() || !found->second.group) {
        return;
    }
    auto& group = *found->second.group;
    for (auto& member : group.members) {
        if (member.side.is_on(found->first) || member.side.is_on(other.storage().unsafeGetStorageImpl())) {
            member.side.see();
            member.edition = group.edition;
        }
    }
}

}  // namespace vescale
