// A file whose room is given out in extents and taken back; the part of `depot.cc` about files.
#pragma once

#include <cerrno>
#include <cstdint>
#include <map>

#include <fcntl.h>
#include <unistd.h>

namespace {

constexpr int64_t kPage = 4096;
constexpr int kShort = -2;

int64_t rounded(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Room {
    int file;  // negative: there is none
    int64_t growth;
    std::map<int64_t, int64_t> gaps = {};  // offset -> bytes, none beside another
    int64_t size = 0, used = 0;            // what the file has, and up to where it was given out
};

// Gives the file blocks on the disk up to `end`, so that a full disk is known here.
int extend(Room& room, int64_t end) {
    int error;
    do error = posix_fallocate(room.file, room.size, end - room.size);
    while (error == EINTR);
    // A file system that cannot: writing will find out.
    if (error == EINVAL || error == EOPNOTSUPP || error == ENOSYS) {
        error = ftruncate(room.file, end) ? errno : 0;
    }
    if (error == 0) {
        room.size = end;
    } else if (ftruncate(room.file, room.size)) {  // blocks that it got before it failed
        return error;
    }
    return error;
}

int grow(Room& room, int64_t least) {
    const int64_t want = rounded(least, room.growth);
    const int error = extend(room, want);
    return error && least < want ? extend(room, least) : error;  // what there is room for
}

int take(Room& room, int64_t bytes, int64_t* offset) {
    if (!bytes) return 0;
    for (auto gap = room.gaps.begin(); gap != room.gaps.end(); ++gap) {
        if (gap->second < bytes) continue;
        *offset = gap->first;
        const int64_t rest = gap->second - bytes;
        room.gaps.erase(gap);
        if (rest) room.gaps[*offset + bytes] = rest;
        return 0;
    }
    if (room.used + bytes > room.size) {
        if (int error = grow(room, room.used + bytes)) return error;
    }
    *offset = room.used;
    room.used += bytes;
    return 0;
}

void give_back(Room& room, int64_t offset, int64_t bytes) {
    if (!bytes) return;
    auto next = room.gaps.lower_bound(offset);
    if (next != room.gaps.end() && offset + bytes == next->first) {
        bytes += next->second;
        next = room.gaps.erase(next);
    }
    if (next != room.gaps.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == offset) {
            offset = before->first;
            bytes += before->second;
            room.gaps.erase(before);
        }
    }
    if (offset + bytes == room.used) {
        room.used = offset;
    } else {
        room.gaps[offset] = bytes;
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

}  // namespace
