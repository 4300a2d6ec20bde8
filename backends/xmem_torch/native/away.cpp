// Storages whose bytes are elsewhere: whoever reads one is told so. Without this PyTorch reads at
// address 0, as most operations do not ask whether there is memory behind a tensor.
#include <string>

#include <c10/core/StorageImpl.h>

extern "C" {

// From now on reading or writing an empty storage raises with these words.
void xmem_torch_refuse_access(c10::StorageImpl* storage, const char* words) {
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(words));
}

// Exchanges what two storages hold: memory, size, allocator, and whether access is refused.
// Tensors, views and what autograd has saved go on referring to the same storages.
void xmem_torch_exchange(c10::StorageImpl* one, c10::StorageImpl* other) {
    one->swap_data_ptr(*other);
}
}
