//! `POST /kv/v1/get`: the blocks of a list of keys, streamed as they are found.
//!
//! A client that reads slowly holds few blocks: two reads are ahead of it, and its connection is closed where it stops.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use protocol::kv_wire::{CONTENT_TYPE, encode_record};
use protocol::{KvFrame, Lookup};

use super::{KvError, KvService};

/// Keys that are read together.
const KEYS_AT_ONCE: usize = 4;
/// Reads ahead of the client.
const READS_AHEAD: usize = 2;

pub(super) async fn get(State(service): State<KvService>, body: Body) -> Result<Response, KvError> {
    let keys = service.keys(body).await?;
    let turn = Arc::new(service.turn().await?);
    let store = service.store;
    let batches: Vec<_> = keys.chunks(KEYS_AT_ONCE).map(<[_]>::to_vec).collect();
    let reads = stream::iter(batches).map(move |keys| {
        let (store, turn) = (Arc::clone(&store), Arc::clone(&turn));
        async move {
            let found = store.get_to_send(&keys).await;
            drop(turn);
            stream::iter(found.into_iter().flat_map(|lookup| parts(&lookup)))
        }
    });
    let pieces = reads.buffered(READS_AHEAD).flatten().map(Ok::<_, std::convert::Infallible>);
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], Body::from_stream(pieces)).into_response())
}

/// What is sent for one key.
fn parts(lookup: &Lookup<KvFrame>) -> Vec<Bytes> {
    let record = encode_record(lookup);
    match lookup {
        Lookup::Hit(frame) => {
            let head = Bytes::from([&record[..], &frame.header.encode()].concat());
            vec![head, frame.payload.clone()]
        }
        Lookup::Miss | Lookup::Busy => vec![record],
    }
}
