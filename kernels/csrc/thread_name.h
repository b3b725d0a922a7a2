// Names by which tools that list a process's threads show ours.
#pragma once

#include <pthread.h>

#include <thread>

namespace shoal {

// At most 15 characters. Whoever starts a thread names it, so that it has its name once it has been started.
inline void name_thread([[maybe_unused]] std::thread& thread, [[maybe_unused]] const char* name) {
#if defined(__linux__)
    pthread_setname_np(thread.native_handle(), name);
#endif
}

}  // namespace shoal
