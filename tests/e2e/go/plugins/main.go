// Command plugins is the part of a kubelet that DRA drivers see: its plugin
// manager and DRA plugin manager, unchanged, without an API server. It registers
// what appears in the folder `registry` and obeys lines from its input; each is
// answered with a line of JSON: {"answer": ...} or {"error": "..."}.
//
//	registered DRIVER                       waits until the driver is registered
//	unregistered DRIVER                     waits until it is not
//	prepare DRIVER NAMESPACE/NAME/UID...    NodePrepareResources; the same for unprepare
//	beta-prepare ENDPOINT ...               with v1beta1, directly; the same for beta-unprepare
//	health                                  waits for a message of a health stream
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	beta "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

type program struct {
	manager *plugin.DRAPluginManager
	health  chan *health.NodeWatchResourcesResponse
}

// HandleWatchResourcesStream is called by the DRA plugin manager.
func (p *program) HandleWatchResourcesStream(
	_ context.Context, stream health.DRAResourceHealth_NodeWatchResourcesClient, _ string,
) error {
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		p.health <- message
	}
}

func (p *program) obey(ctx context.Context, words []string) (proto.Message, error) {
	switch verb, rest := words[0], words[1:]; verb {
	case "registered", "unregistered":
		for {
			if _, err := p.manager.GetPlugin(rest[0]); (err == nil) == (verb == "registered") {
				return nil, nil
			}
			time.Sleep(10 * time.Millisecond)
		}
	case "prepare", "unprepare":
		driver, err := p.manager.GetPlugin(rest[0])
		if err != nil {
			return nil, err
		}
		if verb == "prepare" {
			return driver.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: claims(rest[1:])})
		}
		return driver.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: claims(rest[1:])})
	case "beta-prepare", "beta-unprepare":
		connection, err := grpc.NewClient("unix:"+rest[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		defer connection.Close()
		client := beta.V1Beta1ClientWrapper{DRAPluginClient: beta.NewDRAPluginClient(connection)}
		if verb == "beta-prepare" {
			return client.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: claims(rest[1:])})
		}
		return client.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: claims(rest[1:])})
	case "health":
		return <-p.health, nil
	default:
		return nil, fmt.Errorf("unknown command %s", verb)
	}
}

func claims(words []string) []*dra.Claim {
	var found []*dra.Claim
	for _, word := range words {
		parts := strings.Split(word, "/")
		found = append(found, &dra.Claim{Namespace: parts[0], Name: parts[1], Uid: parts[2]})
	}
	return found
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: plugins REGISTRY")
	}
	ctx := context.Background()
	run := &program{health: make(chan *health.NodeWatchResourcesResponse, 1000)}
	run.manager = plugin.NewDRAPluginManager(ctx, nil, nil, run, time.Hour)
	plugins := pluginmanager.NewPluginManager(os.Args[1], nil)
	plugins.AddHandler("DRAPlugin", run.manager)
	go plugins.Run(ctx, nil, make(chan struct{}))
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		answer := map[string]any{}
		if message, err := run.obey(ctx, strings.Fields(lines.Text())); err != nil {
			answer["error"] = err.Error()
		} else if message != nil {
			encoded, err := protojson.Marshal(message)
			if err != nil {
				log.Fatal(err)
			}
			answer["answer"] = json.RawMessage(encoded)
		}
		text, err := json.Marshal(answer)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(text))
	}
}
