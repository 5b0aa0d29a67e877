//! KV blocks: who holds which (pool and tables, pure) and where their bytes lie (layout).

mod block_copies;
mod block_manager;
mod block_pool;
mod kv_cache;
mod staged;

pub use block_copies::{BlockCopies, BlockName, COPY_BYTES, Load, Store};
pub use block_manager::{BlockManager, BlockTable};
pub use block_pool::{BlockId, BlockPool};
pub use kv_cache::{BLOCK_SIZE, KvCacheDtype, KvLayout, PayloadShape, SCALED_VALUES};
pub use staged::{Staged, StagedBlock};
