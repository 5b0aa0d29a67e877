//! The router over networks that are not good, and beside engines of other releases: hosts that are parted in the middle of
//! streams, events that come seconds late, event streams of a newer release. Each stream comes whole.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use support::route::{Cluster, Route, Streamed, assert_all_whole, chat, profile, read_stream, signal, streams};
use support::server::Server;

/// A host of its own: a network namespace, joined to this one by a cable.
struct Host {
    name: String,
    /// Its end of the cable.
    cable: String,
    address: String,
}

fn run(program: &str, words: &str) -> Result<(), String> {
    let output = Command::new(program).args(words.split(' ')).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{program} {words}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

impl Host {
    /// Needs root and `ip`.
    fn new(number: u32) -> Result<Self, String> {
        let id = std::process::id() % 100_000;
        let (name, near, cable) = (format!("pgd{id}-{number}"), format!("pn{id}-{number}"), format!("pf{id}-{number}"));
        let net = format!("10.{}.{}", 100 + id % 100, 10 * (id / 100 % 20) + number);
        let host = Self { name: name.clone(), cable: cable.clone(), address: format!("{net}.2") };
        run("ip", &format!("netns add {name}"))?;
        run("ip", &format!("link add {near} type veth peer name {cable}"))?;
        run("ip", &format!("link set {cable} netns {name}"))?;
        run("ip", &format!("addr add {net}.1/24 dev {near}"))?;
        run("ip", &format!("link set {near} up"))?;
        host.inside(&format!("ip addr add {net}.2/24 dev {cable}"))?;
        host.inside(&format!("ip link set {cable} up"))?;
        host.inside("ip link set lo up")?;
        Ok(host)
    }

    fn inside(&self, words: &str) -> Result<(), String> {
        run("ip", &format!("netns exec {} {words}", self.name))
    }

    /// An engine on this host.
    fn engine(&self, profile: &str, token: &str) -> Server {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, env!("CARGO_BIN_EXE_pagoda"), "serve", "--port", "0"]);
        command.args(["--device", &format!("sim:{profile}"), "--served-model-name", "m"]);
        command.args(["--internal-listen", &format!("{}:0", self.address), "--cluster-token-file", token]);
        Server::start_by(&mut command)
    }

    /// Pulls the cable: what is sent is lost, and nobody is told.
    fn part(&self) {
        self.inside(&format!("ip link set {} down", self.cable)).unwrap();
    }

    fn join(&self) {
        self.inside(&format!("ip link set {} up", self.cable)).unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(run("ip", &format!("netns del {}", self.name)));
    }
}

#[test]
fn hosts_that_are_parted_break_no_stream() {
    let hosts = (1..=3).map(Host::new).collect::<Result<Vec<_>, _>>();
    let hosts = match hosts {
        Ok(hosts) => hosts,
        Err(error) => {
            eprintln!("no hosts of its own can be made here, which takes root and iproute2: {error}");
            assert!(std::env::var_os("REQUIRE_HOSTS").is_none(), "{error}");
            return;
        }
    };
    // A bad line where the kernel has one to give: late, out of order, and with losses.
    let netem = |host: &Host| {
        host.inside(&format!("tc qdisc add dev {} root netem delay 20ms 10ms loss 1%", host.cable))
            .inspect_err(|error| eprintln!("without delays and losses: {error}"))
    };
    hosts.iter().take_while(|host| netem(host).is_ok()).count();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("token"), "a-token-of-the-cluster").unwrap();
    std::fs::write(path("profile.toml"), profile(20.0, 0.05, 2000)).unwrap();
    let engines: Vec<Server> = hosts.iter().map(|host| host.engine(&path("profile.toml"), &path("token"))).collect();
    let entry = |engine: &Server| format!("[[worker]]\nurl = \"http://{}\"\n", engine.internal);
    std::fs::write(path("workers.toml"), engines.iter().map(entry).collect::<String>()).unwrap();
    let flags = ["--cluster-token-file", &path("token"), "--stream-timeout", "3"];
    let route = Route::start(path("workers.toml").as_ref(), 3, &flags);
    for parted in &hosts[..2] {
        let all = streams(&route, 24, 100, || {
            std::thread::sleep(Duration::from_millis(500));
            parted.part();
        });
        assert_all_whole(&all, 100);
        let gap = all.iter().map(|streamed| streamed.gap).max();
        assert!(gap < Some(Duration::from_secs(8)), "{gap:?}");
        route.wait_ready(2);
        parted.join();
        route.wait_ready(3);
    }
    assert!(route.metric("pagoda_router_continuations_total", &[]) > 0.0);
    assert_eq!(route.metric("pagoda_router_broken_streams_total", &[]), 0.0);
    // What the parted hosts had under way is over there too.
    assert_all_whole(&streams(&route, 6, 10, || {}), 10);
    route.wait_for("the end of all", || {
        let page =
            route.request_internal("/internal/v1/workers", "authorization: Bearer a-token-of-the-cluster\r\n").json();
        page.as_array().unwrap().iter().all(|worker| worker["report"]["load"]["num_running"] == 0)
    });
}

/// What is done to an event stream: the bytes of the head, then of each chunk of the body, in order, as they are to be sent on.
type Tamper = Arc<dyn Fn(usize, Vec<u8>) -> Vec<u8> + Send + Sync>;

/// Stands before an engine's internal listener and hands everything through, but event streams by way of `tamper`.
fn before(engine: &Server, tamper: Tamper) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, to) = (listener.local_addr().unwrap().to_string(), engine.internal.clone());
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let (to, tamper) = (to.clone(), Arc::clone(&tamper));
            std::thread::spawn(move || pass(near, &to, &tamper));
        }
    });
    address
}

fn pass(near: TcpStream, to: &str, tamper: &Tamper) {
    let far = TcpStream::connect(to).unwrap();
    let (mut up, mut down) = ((near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near));
    let mut first = [0; 4096];
    let read = up.0.read(&mut first).unwrap_or(0);
    let is_events = first[..read].starts_with(b"GET /internal/v1/events");
    drop(up.1.write_all(&first[..read]));
    std::thread::spawn(move || {
        drop(std::io::copy(&mut up.0, &mut up.1));
        drop(up.1.shutdown(std::net::Shutdown::Both));
    });
    match is_events {
        true => drop(pass_events(down.0, &mut down.1, tamper)),
        false => drop(std::io::copy(&mut down.0, &mut down.1)),
    }
    drop(down.1.shutdown(std::net::Shutdown::Both));
}

fn pass_events(from: TcpStream, to: &mut TcpStream, tamper: &Tamper) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        from.read_line(&mut head)?;
    }
    to.write_all(head.as_bytes())?;
    for number in 0.. {
        let mut len = String::new();
        from.read_line(&mut len)?;
        let mut chunk = vec![0; usize::from_str_radix(len.trim(), 16).unwrap_or(0)];
        from.read_exact(&mut chunk)?;
        from.read_line(&mut len)?;
        let chunk = tamper(number, chunk);
        to.write_all(format!("{:x}\r\n", chunk.len()).as_bytes())?;
        to.write_all(&chunk)?;
        to.write_all(b"\r\n")?;
    }
    Ok(())
}

/// A router over the addresses.
fn route_over(cluster: &Cluster, addresses: &[String], ready: usize) -> Route {
    let entry = |address: &String| format!("[[worker]]\nurl = \"http://{address}\"\n");
    cluster.write_text(&addresses.iter().map(entry).collect::<String>());
    Route::start(&cluster.workers_file(), ready, &[])
}

#[test]
fn events_that_lag_by_seconds_make_it_slower_and_not_wrong() {
    let cluster = Cluster::start(3, &profile(5.0, 0.2, 60));
    // Each piece is two seconds old when it arrives, whatever comes behind it.
    let lag: Tamper = Arc::new(|number, chunk| {
        if number == 1 {
            std::thread::sleep(Duration::from_secs(2));
        }
        chunk
    });
    let addresses: Vec<String> = cluster.engines.iter().map(|engine| before(engine, Arc::clone(&lag))).collect();
    let route = route_over(&cluster, &addresses, 3);
    // Pools of 60 blocks: what the router believes to be held has long been given to others.
    for _ in 0..3 {
        let read = |number| read_stream(route.send("POST", "/v1/chat/completions", "", &chat(number, 12).to_string()));
        assert_all_whole(&(0..24).map(read).collect::<Vec<Streamed>>(), 12);
    }
    let hit = route.metric("pagoda_router_hit_tokens_total", &[]);
    let predicted = route.metric("pagoda_router_predicted_tokens_total", &[]);
    assert!(predicted != hit, "the lag shows in the metrics: predicted {predicted} and hit {hit}");
    assert_eq!(route.metric("pagoda_router_circuit_opened_total", &[]), 0.0, "late is no fault");
    // A kill is seen by the streams themselves, long before events tell of it.
    let all = streams(&route, 12, 60, || {
        std::thread::sleep(Duration::from_millis(150));
        signal(cluster.engines[0].pid(), "KILL");
    });
    assert_all_whole(&all, 60);
    assert!(all.iter().all(|streamed| streamed.gap < Duration::from_secs(2)), "{all:?}");
}

#[test]
fn engines_of_newer_releases_are_followed_as_far_as_they_can_be_read() {
    let cluster = Cluster::start(3, &profile(5.0, 0.05, 2000));
    // The first chunk begins with the hello: length u32, kind u8, version u16, readable by u16.
    let newer = |readable_by: u8| -> Tamper {
        Arc::new(move |number, mut chunk| {
            if number == 0 {
                (chunk[5], chunk[7]) = (9, readable_by);
            }
            // A record of a kind that this release does not know.
            chunk.extend([3, 0, 0, 0, 200, 1, 2]);
            chunk
        })
    };
    let addresses = [
        before(&cluster.engines[0], newer(1)),
        before(&cluster.engines[1], newer(9)),
        cluster.engines[2].internal.clone(),
    ];
    let route = route_over(&cluster, &addresses, 2);
    let all = streams(&route, 24, 40, || {
        std::thread::sleep(Duration::from_millis(100));
        signal(cluster.engines[2].pid(), "KILL");
    });
    assert_all_whole(&all, 40);
    let log = route.log.lock().unwrap().clone();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("cannot be followed")).collect();
    assert_eq!(told.len(), 1, "once: {log}");
    assert!(told[0].contains(&addresses[1]) && told[0].contains('9'), "{told:?}");
    // What is held at the one that can be read is known.
    assert!(route.metric("pagoda_router_index_chunks", &[]) > 0.0);
}
