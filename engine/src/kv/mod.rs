//! KV blocks: who holds which (pool and tables, pure) and where their bytes lie (layout).

mod block_manager;
mod block_pool;
mod kv_cache;

pub use block_manager::{BlockManager, BlockTable};
pub use block_pool::{BlockId, BlockPool};
pub use kv_cache::{BLOCK_SIZE, KvLayout};
