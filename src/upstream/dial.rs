//! Dialling a host with several addresses: the next is tried before the last has failed (RFC 8305, "happy eyeballs"), so
//! that one that nobody answers at costs a quarter of a second and not the whole time that there is.

use std::{io, net::SocketAddr, time::Duration};

use socket2::{SockRef, TcpKeepalive};
use tokio::{net::TcpStream, task::JoinSet, time::timeout};

/// The head start of an address over the next (RFC 8305 §5).
const HEAD_START: Duration = Duration::from_millis(250);

/// A connection to the first address of the host that answers.
pub(super) async fn dial(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses: Vec<_> = tokio::net::lookup_host((host, port)).await?.collect();
    let socket = race(alternate(addresses)).await?;
    socket.set_nodelay(true)?;
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15));
    SockRef::from(&socket).set_tcp_keepalive(&keepalive)?;
    Ok(socket)
}

/// The addresses with their families taking turns, beginning with the one that the resolver puts first (RFC 8305 §4).
fn alternate(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Some(preferred) = addresses.first().map(SocketAddr::is_ipv4) else { return addresses };
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv4() == preferred);
    let turns = first.len().max(second.len());
    (0..turns).flat_map(|turn| [first.get(turn), second.get(turn)]).flatten().copied().collect()
}

/// The connection that is there first. The others are given up. If none comes, the first failure tells why.
async fn race(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut untried = addresses.into_iter();
    let mut attempts = JoinSet::new();
    let mut failure = None;
    loop {
        if let Some(address) = untried.next() {
            attempts.spawn(TcpStream::connect(address));
        }
        let ended = if untried.len() == 0 {
            attempts.join_next().await
        } else {
            match timeout(HEAD_START, attempts.join_next()).await {
                Ok(ended) => ended,
                Err(_elapsed) => continue,
            }
        };
        match ended.map(|attempt| attempt.map_err(io::Error::from).and_then(|connected| connected)) {
            Some(Ok(socket)) => return Ok(socket),
            Some(Err(error)) => failure = failure.or(Some(error)),
            None => return Err(failure.unwrap_or_else(|| io::Error::other("the name has no address"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|address| address.parse().unwrap()).collect()
    }

    #[test]
    fn families_take_turns_in_the_order_of_the_resolver() {
        for (found, tried) in [
            (&[][..], &[][..]),
            (&["1.1.1.1:1", "1.1.1.2:1"], &["1.1.1.1:1", "1.1.1.2:1"]),
            (
                &["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1", "1.1.1.2:1"],
                &["[::1]:1", "1.1.1.1:1", "[::2]:1", "1.1.1.2:1", "[::3]:1"],
            ),
            (&["1.1.1.1:1", "[::1]:1", "1.1.1.2:1"], &["1.1.1.1:1", "[::1]:1", "1.1.1.2:1"]),
        ] {
            assert_eq!(alternate(addresses(found)), addresses(tried));
        }
    }

    /// An address whose queue is full, so that nobody answers there, and what fills it.
    async fn black_hole() -> (SocketAddr, impl Sized) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let mut queue = Vec::new();
        while let Ok(waiting) = timeout(Duration::from_millis(500), TcpStream::connect(address)).await {
            queue.push(waiting.unwrap());
        }
        (address, (listener, queue))
    }

    #[tokio::test]
    async fn an_address_that_nobody_answers_at_holds_nobody_up() {
        let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (silent, _full) = black_hole().await;
        let addresses = vec![silent, silent, good.local_addr().unwrap()];
        let connected = timeout(Duration::from_secs(30), race(addresses)).await;
        let socket = connected.expect("the silent ones are not waited for").unwrap();
        assert_eq!(socket.peer_addr().unwrap(), good.local_addr().unwrap());
    }

    #[tokio::test]
    async fn a_refusal_is_followed_by_the_next_address_at_once_and_the_first_one_is_told() {
        let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let socket = race(vec![closed, good.local_addr().unwrap()]).await.unwrap();
        assert_eq!(socket.peer_addr().unwrap(), good.local_addr().unwrap());
        let error = race(vec![closed, closed]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(race(Vec::new()).await.is_err());
    }

    #[tokio::test]
    async fn localhost_is_found_in_whichever_family_somebody_listens() {
        let families = ["127.0.0.1:0", "[::1]:0"];
        let mut listened = 0;
        for address in families {
            // A machine may have no IPv6, or a `localhost` that knows one family alone.
            let Ok(listener) = TcpListener::bind(address).await else { continue };
            let port = listener.local_addr().unwrap().port();
            let known = tokio::net::lookup_host(("localhost", port)).await.unwrap();
            if known.into_iter().any(|address| address.is_ipv4() == listener.local_addr().unwrap().is_ipv4())
            {
                dial("localhost", port).await.unwrap();
                listened += 1;
            }
        }
        assert!(listened > 0);
    }
}
