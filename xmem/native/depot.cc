// Bytes kept outside of a framework's memory: in an unlinked file, or in memory of their own.
//
// Extents of a file are given out and taken back here, at run time, since on a lazy framework only
// the operations know when bytes come and go. Calls may come from several threads.
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int64_t kPage = 4096;
constexpr int kFailedBefore = -1, kShort = -2, kUnknown = -3, kOtherSize = -4;

int64_t rounded(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Held {
    int64_t offset;  // in the file
    void* memory;    // or where it is without one
    int64_t bytes;
};

struct Depot {
    int file;  // negative: memory
    int64_t growth;
    std::mutex lock;
    std::unordered_map<int64_t, Held> held;
    std::map<int64_t, int64_t> gaps;  // offset -> bytes, none beside another
    int64_t size = 0, used = 0;       // of the file: what it has, and up to where it was given out
    int64_t stored = 0, peak = 0, written = 0, read = 0;
    int failed = 0;
};

// Makes the file longer, with blocks on the disk behind it, so that a full disk is known here.
int grow(Depot& depot, int64_t least) {
    const int64_t want = rounded(least, depot.growth);
    int error = posix_fallocate(depot.file, depot.size, want - depot.size);
    if (error == 0) depot.size = want;
    if (error == 0 || least == want) return error;
    error = posix_fallocate(depot.file, depot.size, least - depot.size);  // what there is room for
    if (error == 0) depot.size = least;
    return error;
}

int take(Depot& depot, int64_t bytes, int64_t* offset) {
    for (auto gap = depot.gaps.begin(); gap != depot.gaps.end(); ++gap) {
        if (gap->second < bytes) continue;
        *offset = gap->first;
        const int64_t rest = gap->second - bytes;
        depot.gaps.erase(gap);
        if (rest) depot.gaps[*offset + bytes] = rest;
        return 0;
    }
    if (depot.used + bytes > depot.size) {
        if (int error = grow(depot, depot.used + bytes)) return error;
    }
    *offset = depot.used;
    depot.used += bytes;
    return 0;
}

void give_back(Depot& depot, int64_t offset, int64_t bytes) {
    auto next = depot.gaps.lower_bound(offset);
    if (next != depot.gaps.end() && offset + bytes == next->first) {
        bytes += next->second;
        next = depot.gaps.erase(next);
    }
    if (next != depot.gaps.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == offset) {
            offset = before->first;
            bytes += before->second;
            depot.gaps.erase(before);
        }
    }
    if (offset + bytes == depot.used) {
        depot.used = offset;
    } else {
        depot.gaps[offset] = bytes;
    }
}

void release(Depot& depot, const Held& held) {
    if (depot.file >= 0) {
        give_back(depot, held.offset, rounded(held.bytes, kPage));
    } else if (held.memory) {
        munmap(held.memory, rounded(held.bytes, kPage));
    }
}

int write_all(int file, const char* from, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
        const ssize_t done = pwrite(file, from, bytes, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (done == 0) return ENOSPC;
        from += done, offset += done, bytes -= done;
    }
    return 0;
}

int read_all(int file, char* to, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
        const ssize_t done = pread(file, to, bytes, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (done == 0) return kShort;
        to += done, offset += done, bytes -= done;
    }
    return 0;
}

// Finds room and notes it; what was under the number goes first.
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
    if (depot.file >= 0) {
        error = take(depot, rounded(bytes, kPage), &made->offset);
    } else if (bytes) {
        made->memory = mmap(nullptr, rounded(bytes, kPage), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made->memory == MAP_FAILED) error = errno;
    }
    if (error) {
        depot.failed = error;
        return error;
    }
    if (old != depot.held.end()) {
        release(depot, old->second);
        depot.stored -= old->second.bytes;
    }
    depot.held[number] = *made;
    depot.stored += bytes;
    if (depot.stored > depot.peak) depot.peak = depot.stored;
    return 0;
}

}  // namespace

extern "C" {

// Of an open file, which it closes at the end; negative: memory. The file grows by `growth` bytes.
void* xmem_depot_open(int file, int64_t growth) {
    auto* depot = new Depot;
    depot->file = file;
    depot->growth = growth;
    return depot;
}

void xmem_depot_close(Depot* depot) {
    for (auto& [number, held] : depot->held) {
        if (depot->file < 0) release(*depot, held);
    }
    if (depot->file >= 0) close(depot->file);
    delete depot;
}

void xmem_depot_drop(Depot* depot, int64_t number) {
    std::lock_guard<std::mutex> guard(depot->lock);
    auto found = depot->held.find(number);
    if (found == depot->held.end()) return;
    release(*depot, found->second);
    depot->stored -= found->second.bytes;
    depot->held.erase(found);
}

// 0: stored. Positive: an errno, and nothing is stored from here on. kFailedBefore: so it was.
int xmem_depot_put(Depot* depot, int64_t number, const void* from, int64_t bytes) {
    Held held;
    if (int error = reserve(*depot, number, bytes, &held)) return error;
    int error = 0;
    if (depot->file >= 0) {
        error = write_all(depot->file, (const char*)from, bytes, held.offset);
    } else if (bytes) {
        memcpy(held.memory, from, bytes);
    }
    if (error) xmem_depot_drop(depot, number);
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
int xmem_depot_get(Depot* depot, int64_t number, void* to, int64_t bytes) {
    Held held;
    {
        std::lock_guard<std::mutex> guard(depot->lock);
        auto found = depot->held.find(number);
        if (found == depot->held.end()) return kUnknown;
        held = found->second;
        if (held.bytes != bytes) return kOtherSize;
        depot->read += bytes;
    }
    if (depot->file >= 0) return read_all(depot->file, (char*)to, bytes, held.offset);
    if (bytes) memcpy(to, held.memory, bytes);
    return 0;
}

// The system may begin to read now.
void xmem_depot_will_need(Depot* depot, int64_t number) {
    std::lock_guard<std::mutex> guard(depot->lock);
    auto found = depot->held.find(number);
    if (found == depot->held.end() || depot->file < 0) return;
    posix_fadvise(depot->file, found->second.offset, found->second.bytes, POSIX_FADV_WILLNEED);
}

int xmem_depot_has(Depot* depot, int64_t number) {
    std::lock_guard<std::mutex> guard(depot->lock);
    return depot->held.count(number);
}

// Stored bytes, their peak, written, read, size of the file, count, errno of the first failure.
void xmem_depot_counters(Depot* depot, int64_t* found) {
    std::lock_guard<std::mutex> guard(depot->lock);
    const int64_t values[] = {depot->stored, depot->peak, depot->written, depot->read,
                              depot->size,   (int64_t)depot->held.size(), depot->failed};
    memcpy(found, values, sizeof values);
}
}
