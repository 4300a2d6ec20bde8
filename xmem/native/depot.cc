// Bytes kept outside of a framework's memory: in an unlinked file, or in memory of their own.
//
// Extents of a file are given out and taken back here, at run time, since on a lazy framework only
// the operations know when bytes come and go. Calls may come from several threads, those about one
// number one after the other.
//
// What callers have of a depot is a number and no address: calls after its end find none, those that
// run when it ends finish first, and a forked process has none of its parent's, whose file it shares.
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "depot_room.h"

namespace {

constexpr int kFailedBefore = -1, kUnknown = -3, kOtherSize = -4, kClosed = -5;  // kShort: -2
constexpr long kTmpfs = 0x01021994, kRamfs = 0x858458f6;  // statfs(2)

struct Held {
    int64_t offset;  // in the file
    void* memory;    // or where it is without one
    int64_t bytes;
};

struct Depot {
    Room room;  // without a file: memory
    std::mutex lock;
    std::unordered_map<int64_t, Held> held;
    int64_t stored = 0, peak = 0, written = 0, read = 0;
    int failed = 0;
};

void release(Depot& depot, const Held& held) {
    if (depot.room.file >= 0) {
        give_back(depot.room, held.offset, rounded(held.bytes, kPage));
    } else if (held.memory) {
        munmap(held.memory, rounded(held.bytes, kPage));
    }
}

// Finds room and notes it; what was under the number is given up for it.
int reserve(Depot& depot, int64_t number, int64_t bytes, Held* made) {
    std::lock_guard<std::mutex> guard(depot.lock);
    if (depot.failed) return kFailedBefore;
    auto old = depot.held.find(number);
    if (old != depot.held.end() && old->second.bytes == bytes) {
        *made = old->second;
        return 0;
    }
    *made = {0, nullptr, bytes};
    int error = 0;
    if (depot.room.file >= 0) {
        error = take(depot.room, rounded(bytes, kPage), &made->offset);
    } else if (bytes) {
        made->memory = mmap(nullptr, rounded(bytes, kPage), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made->memory == MAP_FAILED) error = errno, made->memory = nullptr;
    }
    if (error) {
        depot.failed = error;
        return error;
    }
    if (old != depot.held.end()) {
        release(depot, old->second);
        depot.stored -= old->second.bytes;
        old->second = *made;
    } else {
        try {
            depot.held[number] = *made;
        } catch (const std::bad_alloc&) {
            release(depot, *made);
            return ENOMEM;
        }
    }
    depot.stored += bytes;
    if (depot.stored > depot.peak) depot.peak = depot.stored;
    return 0;
}

void forget(Depot& depot, int64_t number) {
    std::lock_guard<std::mutex> guard(depot.lock);
    auto found = depot.held.find(number);
    if (found == depot.held.end()) return;
    release(depot, found->second);
    depot.stored -= found->second.bytes;
    depot.held.erase(found);
}

void end(Depot* depot) {
    for (auto& [number, held] : depot->held) {
        if (depot->room.file < 0) release(*depot, held);
    }
    if (depot->room.file >= 0) close(depot->room.file);
    delete depot;
}

struct Registry {
    std::mutex lock;
    std::unordered_map<uintptr_t, std::shared_ptr<Depot>> open;
    uintptr_t last = 0;
};

Registry& registry() {
    static auto* one = new Registry;  // threads may outlive what a process takes down at its end
    return *one;
}

void before_fork() { registry().lock.lock(); }
void in_parent() { registry().lock.unlock(); }
void in_child() {
    // Not their destructors: another thread may have been inside of one.
    auto* inherited = new decltype(Registry::open);
    inherited->swap(registry().open);
    for (auto& [handle, depot] : *inherited) {
        if (depot->room.file >= 0) close(depot->room.file);
    }
    registry().lock.unlock();
}

std::shared_ptr<Depot> find(void* handle) {
    std::lock_guard<std::mutex> guard(registry().lock);
    auto found = registry().open.find((uintptr_t)handle);
    return found == registry().open.end() ? nullptr : found->second;
}

bool of_a_file(void* handle) { return (uintptr_t)handle & 1; }

}  // namespace

extern "C" {

// Of an open file, which it closes at the end; negative: memory. The file grows by `growth` bytes.
void* xmem_depot_open(int file, int64_t growth) {
    static const int forks = pthread_atfork(before_fork, in_parent, in_child);
    (void)forks;
    auto* depot = new Depot;
    depot->room = {file, growth};
    std::lock_guard<std::mutex> guard(registry().lock);
    registry().last += 2;
    const uintptr_t handle = registry().last + (file >= 0);
    registry().open.emplace(handle, std::shared_ptr<Depot>(depot, end));
    return (void*)handle;
}

// Calls that run keep what they use until they are done.
void xmem_depot_close(void* handle) {
    std::shared_ptr<Depot> depot;  // ends outside of the lock
    std::lock_guard<std::mutex> guard(registry().lock);
    auto found = registry().open.find((uintptr_t)handle);
    if (found == registry().open.end()) return;
    depot = std::move(found->second);
    registry().open.erase(found);
}

void xmem_depot_drop(void* handle, int64_t number) {
    if (auto depot = find(handle)) forget(*depot, number);
}

// 0: stored. Positive: an errno, and nothing is stored from here on. kFailedBefore: so it was.
// kClosed: there is no such depot any more, or it is another process's.
int xmem_depot_put(void* handle, int64_t number, const void* from, int64_t bytes) {
    const auto depot = find(handle);
    if (!depot) return kClosed;
    Held held;
    if (int error = reserve(*depot, number, bytes, &held)) return error;
    int error = 0;
    if (depot->room.file >= 0) {
        error = write_all(depot->room.file, (const char*)from, bytes, held.offset);
    } else if (bytes) {
        memcpy(held.memory, from, bytes);
    }
    if (error) forget(*depot, number);
    std::lock_guard<std::mutex> guard(depot->lock);
    if (error) {
        depot->failed = error;
    } else {
        depot->written += bytes;
    }
    return error;
}

// 0: read; the bytes stay until they are dropped. Positive: an errno. kShort: the file ends before.
// kUnknown: nothing has the number. kOtherSize: what has it is of another size.
int xmem_depot_get(void* handle, int64_t number, void* to, int64_t bytes) {
    const auto depot = find(handle);
    if (!depot) return kClosed;
    Held held;
    {
        std::lock_guard<std::mutex> guard(depot->lock);
        auto found = depot->held.find(number);
        if (found == depot->held.end()) return kUnknown;
        held = found->second;
        if (held.bytes != bytes) return kOtherSize;
        depot->read += bytes;
    }
    if (depot->room.file >= 0) return read_all(depot->room.file, (char*)to, bytes, held.offset);
    if (bytes) memcpy(to, held.memory, bytes);
    return 0;
}

// The system may begin to read now.
void xmem_depot_will_need(void* handle, int64_t number) {
    const auto depot = find(handle);
    if (!depot) return;
    std::lock_guard<std::mutex> guard(depot->lock);
    auto found = depot->held.find(number);
    if (found == depot->held.end() || depot->room.file < 0) return;
    posix_fadvise(depot->room.file, found->second.offset, found->second.bytes, POSIX_FADV_WILLNEED);
}

int xmem_depot_has(void* handle, int64_t number) {
    const auto depot = find(handle);
    if (!depot) return 0;
    std::lock_guard<std::mutex> guard(depot->lock);
    return depot->held.count(number);
}

// Where a piece can be read, and written, in place until it is dropped: its memory, or the file
// there, mapped, which `xmem_depot_unmap` ends. nullptr: nothing has the number, or errno says why.
void* xmem_depot_map(void* handle, int64_t number) {
    const auto depot = find(handle);
    errno = depot ? 0 : EBADF;
    if (!depot) return nullptr;
    std::lock_guard<std::mutex> guard(depot->lock);
    auto found = depot->held.find(number);
    if (found == depot->held.end()) return nullptr;
    const Held& held = found->second;
    if (depot->room.file < 0) return held.memory;
    void* memory = mmap(nullptr, rounded(held.bytes, kPage), PROT_READ | PROT_WRITE, MAP_SHARED,
                        depot->room.file, held.offset);
    return memory == MAP_FAILED ? nullptr : memory;
}

void xmem_depot_unmap(void* handle, int64_t bytes, void* memory) {
    if (of_a_file(handle)) munmap(memory, rounded(bytes, kPage));
}

// Whether the file of a depot is memory: tmpfs.
int xmem_depot_in_memory(void* handle) {
    const auto depot = find(handle);
    struct statfs found;
    if (!depot || depot->room.file < 0 || fstatfs(depot->room.file, &found)) return 0;
    return found.f_type == kTmpfs || (unsigned long)found.f_type == (unsigned long)kRamfs;
}

// Stored bytes, their peak, written, read, size of the file, count, errno of the first failure.
void xmem_depot_counters(void* handle, int64_t* found) {
    memset(found, 0, 7 * sizeof *found);
    const auto depot = find(handle);
    if (!depot) return;
    std::lock_guard<std::mutex> guard(depot->lock);
    const int64_t values[] = {depot->stored, depot->peak, depot->written, depot->read,
                              depot->room.size, (int64_t)depot->held.size(), depot->failed};
    memcpy(found, values, sizeof values);
}
}
