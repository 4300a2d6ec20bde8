// Our pools in the place of Jittor's.
//
// Jittor keeps its allocators in the exported map jittor::allocators, keyed by the pool's type and
// the allocator below it, and looks there at the start of every execution. Replacing the entry
// replaces the pool; no source of Jittor is changed. Tensors made before stay in the old pool.
#pragma once
#include <typeinfo>

#include "graph.h"
#include "misc/cuda_flags.h"
#include "pool.h"
#include "var_holder.h"
#ifdef HAS_CUDA
#include "mem/allocator/cuda_device_allocator.h"
#include "mem/allocator/cuda_host_allocator.h"
#include "mem/allocator/cuda_managed_allocator.h"
#endif
#ifndef _WIN32
#include <pthread.h>
#endif

namespace jittor {

// As in Jittor's mem/allocator.cc, which exports the map but declares it in no header.
struct pair_hash {
    template <class First, class Second>
    std::size_t operator()(const std::pair<First, Second>& key) const {
        return std::hash<First>()(key.first) ^ std::hash<Second>()(key.second);
    }
};
extern std::unordered_map<pair<string, Allocator*>, unique_ptr<Allocator>, pair_hash> allocators;

namespace {

std::vector<Pool*> pools;
std::vector<Allocator*> replaced;  // never freed: older tensors still point to them

Pool* install(Allocator* below) {
    pair<string, Allocator*> key{typeid(SFRLAllocator).name(), below};
    auto found = allocators.find(key);
    if (found != allocators.end()) replaced.push_back(found->second.release());
    auto* pool = new Pool(below);
    allocators[key] = unique_ptr<Allocator>(pool);
    pools.push_back(pool);
    return pool;
}

Pool* pool_of(Allocator* allocator) {
    for (auto* pool : pools)
        if (pool == allocator) return pool;
    return nullptr;
}

// The pool that the next execution allocates from, or nullptr if Jittor's flags choose another.
Pool* active() { return pool_of(get_allocator()); }

// A child has one thread only, and a recursive mutex knows its owner by thread.
void lock_before_fork() { guard.lock(); }
void unlock_after_fork() { guard.unlock(); }
// Nothing may move there: what is away lies in its parent's file.
void renew_in_child() {
    new (&guard) std::recursive_mutex;
    late.may_move = false;
}

}  // namespace
}  // namespace jittor
