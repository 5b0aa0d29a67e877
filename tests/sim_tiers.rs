//! Simulated engines over tiers, on paused time: whatever is preempted, evicted, cut and taken up again, every token is what an
//! engine without tiers gives, blocks return, and holds are as long as they should be.

use cache_tier::{HostStore, Place, PlaceStats, Store, TieredStore};
use engine::config::EngineConfig;
use engine::engine_loop::{self, EngineHandle};
use engine::event::EngineEvent;
use engine::sampling_params::SamplingParams;
use engine::sequence::EngineRequest;
use engine::sim::SimProfile;
use engine::tokenizer::Tokenizer;
use futures_util::future::{BoxFuture, join_all};
use protocol::{BlockKey, KvFrame, Lookup, Prefix, PutOutcome, PutReason};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

fn start(blocks: usize, tiers: Option<Arc<TieredStore>>, change: impl Fn(&mut SimProfile)) -> EngineHandle {
    let mut profile = SimProfile::load("laptop").unwrap();
    profile.kv_blocks = blocks;
    change(&mut profile);
    let mut config = EngineConfig::new(PathBuf::new(), "sim");
    (config.max_num_seqs, config.max_queue) = (8, 10_000);
    engine_loop::spawn_sim(&config, profile, Arc::new(Tokenizer::bytes4()), tiers).unwrap()
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> EngineRequest {
    let params = SamplingParams { max_tokens, ignore_eos: true, ..SamplingParams::default() };
    EngineRequest { prompt, params, ..EngineRequest::default() }
}

/// The tokens of an answer, how much of its prompt was found, and when its first token came.
async fn answer(engine: &EngineHandle, request: EngineRequest, most: usize) -> (Vec<u32>, usize, Duration) {
    let started = Instant::now();
    let mut generation = engine.generate(request).unwrap();
    let (mut tokens, mut cached, mut first) = (Vec::new(), 0, Duration::ZERO);
    while let Some(event) = generation.next().await {
        match event {
            EngineEvent::Resumed { .. } => {}
            EngineEvent::Prompt { num_cached_tokens, .. } => (cached, first) = (num_cached_tokens, started.elapsed()),
            EngineEvent::Token { token_id, .. } => tokens.push(token_id),
            EngineEvent::Finished { .. } => break,
            EngineEvent::Failed(error) => panic!("{error}"),
        }
        // A client that goes away.
        if tokens.len() == most {
            break;
        }
    }
    (tokens, cached, first)
}

async fn settle(engine: &EngineHandle) {
    let settled = async {
        while engine.num_in_engine() > 0 || engine.stats().num_used_blocks > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(600), settled).await.expect("all blocks come back");
}

fn host(bytes: u64) -> Arc<TieredStore> {
    Arc::new(TieredStore::new(Some(HostStore::new(bytes)), None, None, None))
}

/// Request `number` of a crowd that shares prefixes: one of six system prompts, one of twenty conversations, and its own end.
fn of_a_crowd(number: u32) -> EngineRequest {
    let system = (0..100).map(|i| number % 6 * 1000 + i);
    let conversation = (0..60 + number % 20 * 5).map(|i| 100_000 + number % 20 * 1000 + i);
    let own = (0..number % 37).map(|i| 1_000_000 + number * 100 + i);
    request(system.chain(conversation).chain(own).collect(), 20 + (number % 5 * 30) as usize)
}

#[tokio::test(start_paused = true)]
async fn a_crowd_over_a_small_pool_gets_the_same_tokens() {
    let count = if std::env::var_os("PAGODA_TEST_ALL").is_some() { 4000 } else { 400 };
    let large = start(100_000, None, |_| {});
    let expected = join_all((0..count).map(|number| answer(&large, of_a_crowd(number), usize::MAX))).await;
    let tiers = host(64 << 10);
    let small = start(60, Some(Arc::clone(&tiers)), |_| {});
    // Every seventh client goes away in the middle.
    let most = |number: u32| if number % 7 == 3 { 5 } else { usize::MAX };
    let answers = join_all((0..count).map(|number| {
        let small = &small;
        async move {
            tokio::time::sleep(Duration::from_millis(u64::from(number) * 40)).await;
            answer(small, of_a_crowd(number), most(number)).await
        }
    }));
    for (number, ((tokens, ..), (expected, ..))) in answers.await.into_iter().zip(&expected).enumerate() {
        assert_eq!(tokens, expected[..tokens.len()], "request {number}");
        assert!(tokens.len() == expected.len() || number % 7 == 3, "request {number} is short");
    }
    settle(&small).await;
    let stats = small.stats();
    let host = tiers.stats()[0];
    assert!(stats.num_preemptions > 0 && host.stored > 100 && host.hits > 100, "{stats:?} {host:?}");
    assert!(host.evicted > 0 && host.used_bytes <= 64 << 10, "{host:?}");
}

#[tokio::test(start_paused = true)]
async fn a_prefix_from_memory_takes_what_moving_it_takes() {
    let slow = |profile: &mut SimProfile| profile.transfer_gb_per_s = 1.0;
    let engine = start(64, Some(host(1 << 20)), slow);
    let prompt = |seed: u32| request((0..800).map(|i| seed * 10_000 + i).collect(), 1);
    let (_, cached, cold) = answer(&engine, prompt(1), 9).await;
    // 800 tokens at 1.2 ms, in two steps of 2 ms; timers round up.
    assert!(cached == 0 && (964..=966).contains(&cold.as_millis()), "{cached} {cold:?}");
    answer(&engine, prompt(2), 9).await;
    let (_, cached, warm) = answer(&engine, prompt(1), 9).await;
    // 49 blocks of 2 MiB at 1 GB/s come up, and nearly as many go down to make room: 0.2 s and not 0.96.
    assert!(cached == 784 && (100..250).contains(&warm.as_millis()), "{cached} {warm:?}");
}

/// A tier that says yes at once and takes its time.
struct Slow(Duration);

impl Store for Slow {
    fn place(&self) -> Place {
        Place::Remote
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Prefix> {
        Box::pin(async { Prefix { num_blocks: keys.len() / 2, busy: true } })
    }

    fn get<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        Box::pin(async {
            tokio::time::sleep(self.0).await;
            vec![Lookup::Miss; keys.len()]
        })
    }

    fn put(&self, frames: Vec<KvFrame>, _reason: PutReason) -> BoxFuture<'_, Vec<PutOutcome>> {
        Box::pin(async move { vec![PutOutcome::Busy; frames.len()] })
    }

    fn lease<'a>(&'a self, _keys: &'a [BlockKey], _millis: u32) -> BoxFuture<'a, usize> {
        Box::pin(async { 0 })
    }

    fn stats(&self) -> Vec<PlaceStats> {
        vec![PlaceStats::new(Place::Remote)]
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_held_as_long_as_computing_its_blocks_would_take_and_others_pass() {
    let slow = Arc::new(Slow(Duration::from_secs(3600))) as Arc<dyn Store>;
    let engine = start(1000, Some(Arc::new(TieredStore::new(None, None, Some(slow), None))), |_| {});
    let prompt = |seed: u32, len: u32| request((0..len).map(|i| seed * 10_000 + i).collect(), 1);
    // Nothing has been measured: a second, and a prompt without a full block is asked for by nobody.
    let (_, _, first) = answer(&engine, prompt(1, 160), 9).await;
    assert!(first >= Duration::from_secs(1) && first < Duration::from_millis(1300), "{first:?}");
    let (held, short) = tokio::join!(answer(&engine, prompt(2, 321), 9), answer(&engine, prompt(3, 10), 9));
    // The tier has ten of its twenty blocks: 160 tokens at 1.2 ms, and some for the step's own 2 ms.
    let hold = held.2 - Duration::from_micros(2000 + 321 * 1200);
    assert!(hold > Duration::from_millis(180) && hold < Duration::from_millis(230), "{hold:?}");
    assert!(short.2 < Duration::from_millis(30), "{:?}", short.2);
    settle(&engine).await;
}
