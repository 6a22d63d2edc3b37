// Calls a built library as Python would, so that sanitizers see it: driver LIBRARY LEVEL. Exits with 0 where all holds.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

template <typename F>
F* function(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) {
        std::fprintf(stderr, "the library does not export %s\n", name);
        std::exit(1);
    }
    return reinterpret_cast<F*>(found);
}

int main(int count, char** arguments) {
    CHECK(count == 3);
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    CHECK(library != nullptr);

    auto* abi = function<int()>(library, "sk_abi");
    auto* level = function<const char*()>(library, "sk_level");
    auto* source_hash = function<const char*()>(library, "sk_source_hash");
    CHECK(abi() > 0);
    CHECK(std::strcmp(level(), arguments[2]) == 0);
    CHECK(std::strlen(source_hash()) == 16);

    std::vector<std::thread> callers;
    for (int one = 0; one < 4; ++one) callers.emplace_back([=] { CHECK(abi() == abi()); });
    for (auto& one : callers) one.join();
    return 0;
}
