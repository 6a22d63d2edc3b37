// A stand-in for the native engine: it only says what it was built for.
// The library is compiled with -fvisibility=hidden, so a function that Python calls needs SK_EXPORT.
#define SK_EXPORT extern "C" __attribute__((visibility("default")))

SK_EXPORT int sk_abi() { return 1; }                                // equals ABI in library.py
SK_EXPORT const char* sk_level() { return SK_LEVEL; }               // the level it was compiled for
SK_EXPORT const char* sk_source_hash() { return SK_SOURCE_HASH; }   // source_hash() of build.py when it was compiled
