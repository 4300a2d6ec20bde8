// What backward will read and may leave until then, moved when memory runs out.
//
// An operation behind the last reader of forward notes tensors (`xmem_jittor_late_note`), one before
// the first reader of backward takes them back (`xmem_jittor_late_back`); between the two nobody
// reads them. What lies in one allocation leaves together, and only if letting go frees it: all who
// share it are noted. A note holds for as long as its ticket, a tensor of one number that the note
// makes and that Python, or the operation that takes back, holds together with the noted tensors.
// So no address is looked at after its tensor is gone.
#pragma once
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "mem/allocator/sfrl_allocator.h"
#include "var.h"

namespace jittor {
namespace {

// xmem/native/depot.cc
struct DepotCalls {
    int (*put)(void*, int64, const void*, int64) = nullptr;
    int (*get)(void*, int64, void*, int64) = nullptr;
    void (*drop)(void*, int64) = nullptr;
};

struct Noted {
    int64 order;  // of the note that came last; backward begins with the highest
    int64 size;   // of what leaves, the largest of the views: they begin where the first does
    int64 holds;  // of their allocation, of which they may be a part
    int depot;
    size_t allocation;  // where it is not away
    std::vector<std::pair<size_t, Var*>> views;  // by the allocation of their ticket
    bool stored = false, away = false, gone = false;
};

struct LateState {
    DepotCalls calls;
    std::vector<void*> depots;  // null: closed, nothing lies there
    std::map<int64, Noted> noted;
    std::unordered_map<size_t, int64> by_allocation, by_ticket;
    int64 count = 0, moved = 0, left = 0;
    int failure = 0;        // errno of what could not be stored
    int64 missed[4] = {0};  // how often bytes did not come back; of the last: code, bytes, depot
    bool may_move = false;
} late;

bool is_alone(const Noted& noted) {
    Var* first = noted.views[0].second;
    for (auto& [ticket, view] : noted.views)
        if (view->mem_ptr != first->mem_ptr || view->allocation != first->allocation) return false;
    auto* block = CachingBlockPool::occupied_id_mapper[first->allocation];
    return block->share_times + 1 == noted.views.size();
}

bool leave(int64 number, Noted& noted) {
    Var* first = noted.views[0].second;
    if (!noted.stored) {
        const int code = late.calls.put(late.depots[noted.depot], number, first->mem_ptr, noted.size);
        if (code) {
            if (code > 0) late.failure = code;
            return false;
        }
        noted.stored = true;
        late.moved += noted.size;
    }
    late.by_allocation.erase(noted.allocation);
    noted.away = true;
    late.left++;
    for (auto& [ticket, view] : noted.views) {
        auto* allocator = view->allocator;
        void* memory = view->mem_ptr;
        const size_t allocation = view->allocation;
        view->mem_ptr = nullptr;
        view->allocator = nullptr;
        view->allocation = 0;
        allocator->free(memory, view->size, allocation);
    }
    return true;
}

// Moves what backward needs last until so much is free; returns what has been freed.
int64 late_make_room(int64 bytes) {
    int64 freed = 0;
    if (!late.may_move) return 0;
    std::vector<std::pair<int64, int64>> oldest;
    for (auto& [number, noted] : late.noted)
        if (!noted.away && !noted.gone) oldest.push_back({noted.order, number});
    std::sort(oldest.begin(), oldest.end());
    for (auto& [order, number] : oldest) {
        if (freed >= bytes) break;
        auto& noted = late.noted[number];
        if (!is_alone(noted)) continue;
        if (!leave(number, noted)) break;
        freed += noted.holds;
    }
    return freed;
}

std::string late_words() {
    if (!late.may_move) return "";
    std::string text = ". on_oom=\"offload\" has moved " + std::to_string(late.moved) + " bytes";
    return text + "; nothing more can be moved" +
           (late.failure ? std::string(": ") + strerror(late.failure) : "");
}

void forget(std::map<int64, Noted>::iterator found) {
    auto& noted = found->second;
    if (noted.stored && late.depots[noted.depot])
        late.calls.drop(late.depots[noted.depot], found->first);
    if (noted.away) late.left--;
    late.noted.erase(found);
}

// Takes the tensors of a ticket out of what may leave; what nobody notes any more is forgotten.
void end_ticket(size_t ticket) {
    auto known = late.by_ticket.find(ticket);
    if (known == late.by_ticket.end()) return;
    auto found = late.noted.find(known->second);
    late.by_ticket.erase(known);
    auto& views = found->second.views;
    for (size_t i = views.size(); i-- > 0;)
        if (views[i].first == ticket) views.erase(views.begin() + i);
    if (!views.empty()) return;
    if (!found->second.away && !found->second.gone)
        late.by_allocation.erase(found->second.allocation);
    forget(found);
}

// Nobody holds an allocation any more: of a ticket, or of noted tensors that are gone before theirs.
void late_freed(size_t allocation) {
    end_ticket(allocation);
    auto known = late.by_allocation.find(allocation);
    if (known == late.by_allocation.end()) return;
    late.noted[known->second].gone = true;
    late.by_allocation.erase(known);
}

}  // namespace
}  // namespace jittor
