// The shared table of the ranks on this host; its layout is that of `xmem/distributed/roll.py`.
#pragma once

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace xmem {

struct Record {
    int64_t process, started, state, sign_of_life, entered, finished;
    char doing[208];
    char error[256];
};
static_assert(sizeof(Record) == 512, "the roll's records are 512 bytes");

enum Presence { ABSENT, HERE, LEFT, FAILED };

inline int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

inline void write_text(char* target, size_t capacity, const std::string& text) {
    size_t size = text.size() < capacity ? text.size() : capacity - 1;
    while (size && size < text.size() && (text[size] & 0xC0) == 0x80) size--;  // whole characters
    std::memcpy(target, text.data(), size);
    target[size] = 0;
}

inline std::string read_text(const char* text, size_t capacity) {
    return std::string(text, strnlen(text, capacity));
}

// Whether the process is gone: no such number, another start, or dead and not yet collected.
inline bool is_gone(const Record& record) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)record.process);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return access("/proc/self/stat", R_OK) == 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return true;
    text[size] = 0;
    const char* at = strrchr(text, ')');  // the name may hold anything
    if (!at || !at[1]) return false;
    at += 2;
    if (*at == 'Z' || *at == 'X') return true;
    for (int field = 3; field < 22 && at; field++) {
        at = strchr(at, ' ');
        if (at) at++;
    }
    return at && record.started && atoll(at) != record.started;
}

}  // namespace xmem
