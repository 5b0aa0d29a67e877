//! A connection on which blocks are asked for: what `GET /kv/v1/get` is upgraded to, at the client's end.
//!
//! Used by `RemoteStore`. Payloads go from the socket to the buffers they stay in. A connection is used again only when
//! everything that it sent has been taken.

use std::sync::Arc;
use std::time::Duration;

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use protocol::kv_wire::{Decoder, WireError};
use protocol::{Buffers, KvFrame, Lookup};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::RemoteError;

/// An upgraded connection.
pub(super) struct BlockStream {
    io: TokioIo<Upgraded>,
    decoder: Decoder,
}

impl BlockStream {
    pub(super) fn new(io: Upgraded, buffers: Arc<Buffers>) -> Self {
        Self { io: TokioIo::new(io), decoder: Decoder::new(buffers) }
    }

    /// Whether nothing is left of earlier answers.
    pub(super) fn is_at_rest(&self) -> bool {
        self.decoder.is_empty()
    }

    /// Sends a list of keys.
    pub(super) async fn ask(&mut self, request: &[u8]) -> Result<(), RemoteError> {
        let sent = async {
            self.io.write_all(request).await?;
            self.io.flush().await
        };
        sent.await.map_err(|error: std::io::Error| RemoteError::Connection(error.to_string()))
    }

    /// The next key's answer. Between two pieces of it at most `piece` passes.
    pub(super) async fn next(&mut self, piece: Duration) -> Result<Lookup<KvFrame>, RemoteError> {
        loop {
            match self.decoder.record() {
                Ok(Some(lookup)) => return Ok(lookup),
                Ok(None) => {}
                Err(WireError::Refused(why)) => return Err(RemoteError::Refused(why)),
                Err(error) => return Err(RemoteError::Garbage(error.to_string())),
            }
            let read = timeout(piece, self.io.read_buf(&mut self.decoder.room())).await;
            match read.map_err(|_| RemoteError::Timeout(piece))? {
                Ok(0) => return Err(RemoteError::Connection("closed before its answer was whole".into())),
                Ok(_) => {}
                Err(error) => return Err(RemoteError::Connection(error.to_string())),
            }
        }
    }
}
